/* Opening and closing an endpoint: its configuration, its row on the board, its loops. */
#include "engine.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const int64_t LEAST_RETRY_NS = 100000, MOST_RETRY_NS = 1000000;
static struct host *hosts; /* of this process */
static pthread_mutex_t hosts_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- configuration, in texts that fusco.rails writes ---- */

bool parse_ip(const char *text, struct sockaddr_storage *address, socklen_t *num_bytes) {
  struct sockaddr_in *v4 = (struct sockaddr_in *)address;
  struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;
  if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    *num_bytes = sizeof *v4;
  } else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    *num_bytes = sizeof *v6;
  }
  return address->ss_family != 0;
}

/* A whole number and nothing else, of a range. */
static bool parse_number(const char *text, long long least, long long most, long long *number) {
  char *end;
  errno = 0;
  *number = strtoll(text, &end, 10);
  return end != text && !*end && !errno && *number >= least && *number <= most;
}

static bool parse_seconds(const char *text, double *seconds) {
  char *end;
  *seconds = strtod(text, &end);
  return end != text && !*end && *seconds > 0 && *seconds < 1e9;
}

/* A rail as "interface,address,bit/s,owner+owner"; NULL, or what is wrong. */
static const char *parse_rail(struct host *host, char *text) {
  char *rest, *rest_of_owners;
  long long number;
  int i = host->sharing.num_rails;
  struct rail *rail = host->rails + i;
  char *interface = strtok_r(text, ",", &rest), *address = strtok_r(NULL, ",", &rest);
  char *speed = strtok_r(NULL, ",", &rest), *owners = strtok_r(NULL, ",", &rest);
  if (!speed || strlen(interface) >= NAME_LIMIT || strlen(address) >= sizeof rail->text) return "a rail is interface,address,bit/s,owners";
  strcpy(rail->named.interface, interface);
  strcpy(rail->text, address);
  if (!parse_ip(address, &rail->address, &rail->address_bytes)) return "an address is no IP address";
  if (!parse_number(speed, 0, INT64_MAX, &number)) return "the bit/s of a rail are not a number, which is 0 if unknown";
  rail->named.bits_per_s = (uint64_t)number;
  for (char *owner = owners ? strtok_r(owners, "+", &rest_of_owners) : NULL; owner; owner = strtok_r(NULL, "+", &rest_of_owners)) {
    if (!parse_number(owner, 0, INT32_MAX, &number)) return "an owner of a rail is not the number of a worker";
    if (number == host->worker) host->sharing.direct |= 1u << i;
  }
  host->sharing.num_rails++;
  return NULL;
}

static const char *parse_rails(struct host *host, char *text) {
  const char *problem = NULL;
  char *rest;
  for (char *each = strtok_r(text, ";", &rest); each && !problem; each = strtok_r(NULL, ";", &rest)) {
    problem = host->sharing.num_rails == MAX_RAILS ? "it has more than 16 rails" : parse_rail(host, each);
  }
  if (problem) return problem;
  if (!host->sharing.num_rails) return "it names no rail; fusco.rails.nccl_plugin() says what to set";
  if (!host->sharing.direct) return "this worker (FUSCO_NCCL_WORKER or LOCAL_RANK) owns no rail";
  for (int i = 0; host->is_nccl && i < host->sharing.num_rails; i++) { /* a handle of 128 bytes has room for so many addresses */
    int family = host->rails[i].address.ss_family;
    if (family != host->rails[0].address.ss_family) return "IPv4 and IPv6 addresses are mixed";
    if (family == AF_INET6 && i == 4) return "it has more than 4 rails with IPv6 addresses";
  }
  return NULL;
}

struct field { /* of a text "name=value,name=value" */
  const char *name;
  int *number;
  double *seconds;
  const char *choices[4]; /* of a number: none for one that is positive, else their names in order */
};

static const char *parse_fields(const struct field *fields, size_t num, char *text) {
  char *rest;
  for (char *each = strtok_r(text, ",", &rest); each; each = strtok_r(NULL, ",", &rest)) {
    char *value = strchr(each, '=');
    long long number;
    size_t i = 0;
    if (value) *value++ = 0;
    while (i < num && (!value || strcmp(fields[i].name, each))) i++;
    if (i == num) return "each of it is the name of a field, = and a value";
    const struct field *field = fields + i;
    if (field->seconds && !parse_seconds(value, field->seconds)) return "a field is not a positive number";
    if (field->seconds) continue;
    if (*field->choices) {
      for (number = 0; number < 4 && field->choices[number] && strcmp(field->choices[number], value);) number++;
      if (number == 4 || !field->choices[number]) return "a field has none of the values that it may have";
    } else if (!parse_number(value, 1, INT32_MAX, &number)) {
      return "a field is not a positive number";
    }
    *field->number = (int)number;
  }
  return NULL;
}

static const char *parse_limits(struct host *host, char *text) {
  struct limits *limits = &host->sharing.limits;
  const struct field fields[] = {
      {"chunk_bytes", &limits->chunk_bytes, NULL, {0}}, {"direct_first", &limits->direct_first, NULL, {0}},
      {"direct_depth", &limits->direct_depth, NULL, {0}}, {"borrowed_per_rail", &limits->borrowed_per_rail, NULL, {0}},
      {"batch", &limits->batch, NULL, {0}}, {"refresh_s", NULL, &limits->refresh_s, {0}}, {"hold_s", NULL, &limits->hold_s, {0}},
      {"release_s", NULL, &limits->release_s, {0}}, {"stall_s", NULL, &limits->stall_s, {0}}, {"no_rail_s", NULL, &limits->no_rail_s, {0}}};
  const char *problem = parse_fields(fields, sizeof fields / sizeof *fields, text);
  if (problem) return problem;
  return limits->direct_depth > MAX_DEPTH || limits->borrowed_per_rail > MAX_DEPTH ? "more than 32 chunks outstanding on a rail" : NULL;
}

static const char *parse_policy(struct host *host, char *text) {
  struct policy *policy = &host->sharing.policy;
  const struct field fields[] = {
      {"rule", &policy->rule, NULL, {"fuselink", "spray", "direct"}}, {"bound", &policy->bound, NULL, {"rail", "worker", "none"}},
      {"monitor", &policy->monitor, NULL, {"activity", "completion"}}, {"defers", &policy->defers, NULL, {"False", "True"}},
      {"heeds_receiver", &policy->heeds_receiver, NULL, {"False", "True"}}, {"refreshes", &policy->refreshes, NULL, {"False", "True"}}};
  return parse_fields(fields, sizeof fields / sizeof *fields, text);
}

static const char *parse_worker(struct host *host, char *text) {
  long long number;
  if (!parse_number(text, 0, UINT16_MAX, &number)) return "it is not the number of a worker, from 0 to 65535";
  host->worker = (int)number;
  return NULL;
}

static const char *parse_timeout(struct host *host, char *text) {
  return parse_seconds(text, &host->timeout_s) ? NULL : "it is not a positive number of seconds";
}

static const char *parse_threads(struct host *host, char *text) {
  long long number;
  if (!parse_number(text, 1, MAX_LOOPS, &number)) return "it is not a number of threads from 1 to 8";
  host->num_loops = (int)number;
  return NULL;
}

/* Take the texts over; false with what is wrong with which. */
static bool configure(struct host *host, const struct config *config, char *why) {
  const struct { const char *name, *value; const char *(*parse)(struct host *host, char *text); } texts[] = {
      {config->worker && host->is_nccl && !getenv("FUSCO_NCCL_WORKER") ? "LOCAL_RANK" : "FUSCO_NCCL_WORKER", config->worker, parse_worker},
      {"FUSCO_NCCL_RAILS", config->rails ? config->rails : "", parse_rails}, {"FUSCO_NCCL_LIMITS", config->limits, parse_limits},
      {"FUSCO_NCCL_POLICY", config->policy, parse_policy}, {"FUSCO_NCCL_TIMEOUT_S", config->timeout_s, parse_timeout},
      {"FUSCO_NCCL_THREADS", config->threads, parse_threads}};
  struct sharing *sharing = &host->sharing;
  host->timeout_s = 60;
  sharing->limits = (struct limits){512 * 1024, 2, 4, 2, 8, 0.001, 0.010, 0.002, 0.3, 3.0};
  sharing->policy = (struct policy){FUSELINK, OF_RAIL, BY_ACTIVITY, 1, 1, 1};
  sharing->counts_all = host->is_nccl;
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    const char *value = texts[i].value, *problem;
    char text[4096];
    if (!value) continue;
    snprintf(text, sizeof text, "%s", value);
    problem = strlen(value) < sizeof text ? texts[i].parse(host, text) : "it is too long";
    if (!problem) continue;
    snprintf(why, WHY_BYTES, "%s: %s (worker %d, %s=%.1000s)", texts[i].name, problem, host->worker, texts[i].name, value);
    return false;
  }
  double fastest = 0;
  for (int i = 0; i < sharing->num_rails; i++) { /* an owner that uses its rail completes a chunk within the time of two */
    double speed = (double)host->rails[i].named.bits_per_s, chunks_s = speed > 0 ? 16.0 * sharing->limits.chunk_bytes / speed : 0;
    sharing->hold_ns[i] = (int64_t)(1e9 * (chunks_s > sharing->limits.hold_s ? chunks_s : sharing->limits.hold_s));
    if (speed > fastest) fastest = speed;
  }
  int64_t quarter_ns = fastest > 0 ? (int64_t)(2e9 * sharing->limits.chunk_bytes / fastest) : LEAST_RETRY_NS; /* of what a chunk takes */
  host->retry_ns = quarter_ns < LEAST_RETRY_NS ? LEAST_RETRY_NS : quarter_ns > MOST_RETRY_NS ? MOST_RETRY_NS : quarter_ns;
  return true;
}

/* ---- life ---- */

static bool take_row(struct host *host, const char *path, char *why) {
  struct sharing *sharing = &host->sharing;
  struct named_rail named[MAX_RAILS];
  char pattern[128];
  struct stat network;
  unsigned long long inode = stat("/proc/self/ns/net", &network) ? 0 : network.st_ino;
  snprintf(pattern, sizeof pattern, "/dev/shm/fusco-rails-v1-%u-%llu.*", getuid(), inode);
  for (int i = 0; i < sharing->num_rails; i++) named[i] = host->rails[i].named;
  if (!board_open(&sharing->board, path ? path : pattern, host->timeout_s, why)) return false;
  double rest_s = sharing->limits.hold_s - sharing->limits.release_s;
  sharing->board.rest_ns = rest_s > 0 ? (int64_t)(1e9 * rest_s) : 0;
  if (board_register(&sharing->board, host->worker, sharing->direct, named, sharing->num_rails, why)) return true;
  board_close(&sharing->board);
  return false;
}

/* Free all but what the caller may still look at. */
static void end_host(struct host *host) {
  for (int i = 0; host->loops && i < host->num_loops; i++) loop_stop(host->loops + i);
  if (host->loops) joining_stop(host);
  while (host->listens) joining_withdraw(host, host->listens);
  for (int i = 0; host->loops && i < host->num_loops; i++) loop_free(host->loops + i);
  board_close(&host->sharing.board);
  if (host->query_fd >= 0) close(host->query_fd);
  free(host->loops);
  free(host);
}

static void enlist(struct host *host, bool is_open) {
  pthread_mutex_lock(&hosts_lock);
  struct host **at = &hosts;
  while (*at && *at != host) at = &(*at)->next;
  if (is_open) {
    *at = host;
  } else if (*at) {
    *at = host->next;
  }
  pthread_mutex_unlock(&hosts_lock);
}

struct host *host_open(const struct config *config, bool is_nccl, int num_loops, void (*log)(bool, const char *), char *why) {
  struct host *host = calloc(1, sizeof *host);
  if (!host) abort();
  host->is_nccl = is_nccl;
  host->log = log;
  host->pid = getpid();
  host->query_fd = -1;
  host->sharing.board.row = -1;
  pthread_mutex_init(&host->lock, NULL);
  pthread_mutex_init(&host->sharing.lock, NULL);
  random_bytes(&host->num_listens, sizeof host->num_listens);
  if (!configure(host, config, why) || !take_row(host, config->board, why)) {
    free(host);
    return NULL;
  }
  if (!host->num_loops) host->num_loops = num_loops < host->sharing.num_rails ? num_loops : host->sharing.num_rails;
  host->query_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct loop *loops = calloc((size_t)host->num_loops, sizeof *loops);
  if (!loops) abort();
  bool works = host->query_fd >= 0;
  int num = 0;
  for (; works && num < host->num_loops; num++) works = loop_open(loops + num, host, num);
  if (!works) snprintf(why, WHY_BYTES, "worker %d cannot use rails: %s", host->worker, strerror(errno));
  host->loops = loops;
  host->num_loops = num;
  if (works && is_nccl) works = joining_listen(host, why);
  if (!works) {
    end_host(host);
    return NULL;
  }
  enlist(host, true);
  host_check_links(host);
  return host;
}

bool host_start(struct host *host, char *why) {
  for (int i = 0; i < host->num_loops; i++) {
    if (loop_start(host->loops + i)) continue;
    snprintf(why, WHY_BYTES, "worker %d cannot use rails: thread %d of %d could not be started: %s", host->worker, i + 1, host->num_loops, strerror(errno));
    host_close(host);
    return false;
  }
  if (!host->is_nccl || joining_begin(host, why)) return true;
  host_close(host);
  return false;
}

void host_close(struct host *host) {
  enlist(host, false);
  if (host->pid == getpid()) end_host(host); /* else the threads and the row are those of the process that this was forked from */
}

/* The process ends, or the library is unloaded, before which NCCL does not say that it is done: what is open stays where it
 * is, since other threads may still use it, but nothing moves any more, and the board is left. */
void host_stop_all(void) {
  pthread_mutex_lock(&hosts_lock);
  for (struct host *host = hosts; host; host = host->next) {
    host->log = NULL;
    if (host->pid != getpid()) continue;
    for (int i = 0; i < host->num_loops; i++) loop_stop(host->loops + i);
    board_leave(&host->sharing.board);
  }
  hosts = NULL;
  pthread_mutex_unlock(&hosts_lock);
}

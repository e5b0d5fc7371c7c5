/* What all channels of the process share: configuration, threads, the board, and NCCL's log. */
#define _GNU_SOURCE
#include "rails.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct host *the_host;
static pthread_mutex_t users = PTHREAD_MUTEX_INITIALIZER;

bool host_defers(int rail) { return the_host->policy == FUSELINK && !(the_host->direct >> rail & 1); }

double host_least_late_s(int rail) {
  const struct limits *limits = &the_host->limits;
  double bits = 8.0 * limits->chunk_bytes * limits->borrowed_per_rail, speed = (double)the_host->rails[rail].bits_per_s;
  double both_s = speed > 0 ? 2 * bits / speed : 0; /* twice those of all that may be on it */
  return both_s > limits->hold_s ? both_s : limits->hold_s;
}

void host_check_links(void) {
  uint32_t links = 0;
  for (int i = 0; i < the_host->num_rails; i++) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    memcpy(request.ifr_name, the_host->rails[i].interface, sizeof request.ifr_name);
    bool has_link = !ioctl(the_host->query_fd, SIOCGIFFLAGS, &request) && (request.ifr_flags & (IFF_UP | IFF_RUNNING)) == (IFF_UP | IFF_RUNNING);
    links |= (uint32_t)has_link << i;
  }
  atomic_store(&the_host->links, links);
}

/* ---- configuration, from what fusco.rails.nccl_plugin() puts into the environment ---- */

static bool parse_address(struct rail *rail) {
  struct sockaddr_in *v4 = (struct sockaddr_in *)&rail->address;
  struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&rail->address;
  if (inet_pton(AF_INET, rail->text, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    rail->address_bytes = sizeof *v4;
  } else if (inet_pton(AF_INET6, rail->text, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    rail->address_bytes = sizeof *v6;
  }
  return rail->address_bytes != 0;
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
  struct rail *rail = host->rails + host->num_rails;
  char *interface = strtok_r(text, ",", &rest), *address = strtok_r(NULL, ",", &rest);
  char *speed = strtok_r(NULL, ",", &rest), *owners = strtok_r(NULL, ",", &rest);
  if (!speed || strlen(interface) >= sizeof rail->interface || strlen(address) >= sizeof rail->text) return "a rail is interface,address,bit/s,owners";
  memcpy(rail->interface, interface, strlen(interface));
  memcpy(rail->text, address, strlen(address));
  if (!parse_address(rail)) return "an address is no IP address";
  if (rail->address.ss_family != host->rails[0].address.ss_family) return "IPv4 and IPv6 addresses are mixed";
  if (!parse_number(speed, 0, INT64_MAX, &number)) return "the bit/s of a rail are not a number, which is 0 if unknown";
  rail->bits_per_s = (uint64_t)number;
  for (char *owner = owners ? strtok_r(owners, "+", &rest_of_owners) : NULL; owner; owner = strtok_r(NULL, "+", &rest_of_owners)) {
    if (!parse_number(owner, 0, INT32_MAX, &number)) return "an owner of a rail is not the number of a worker";
    if (number == host->worker) host->direct |= 1u << host->num_rails;
  }
  host->num_rails++;
  return NULL;
}

static const char *parse_rails(struct host *host, char *text) {
  const char *problem = NULL;
  char *rest;
  for (char *each = strtok_r(text, ";", &rest); each && !problem; each = strtok_r(NULL, ";", &rest)) {
    problem = host->num_rails == MAX_RAILS ? "it has more than 16 rails" : parse_rail(host, each);
  }
  if (problem) return problem;
  /* A handle of 128 bytes has room for so many addresses. */
  if (host->num_rails > 4 && host->rails[0].address.ss_family == AF_INET6) return "it has more than 4 rails with IPv6 addresses";
  if (!host->num_rails) return "it names no rail; fusco.rails.nccl_plugin() says what to set";
  return host->direct ? NULL : "this worker (FUSCO_NCCL_WORKER or LOCAL_RANK) owns no rail";
}

static const char *parse_limits(struct host *host, char *text) {
  struct limits *limits = &host->limits;
  const struct { const char *name; int *number; double *seconds; } fields[] = {
      {"chunk_bytes", &limits->chunk_bytes, NULL}, {"direct_first", &limits->direct_first, NULL},
      {"direct_depth", &limits->direct_depth, NULL}, {"borrowed_per_rail", &limits->borrowed_per_rail, NULL},
      {"batch", &limits->batch, NULL}, {"refresh_s", NULL, &limits->refresh_s}, {"hold_s", NULL, &limits->hold_s},
      {"release_s", NULL, &limits->release_s}, {"stall_s", NULL, &limits->stall_s}, {"no_rail_s", NULL, &limits->no_rail_s}};
  char *rest;
  for (char *each = strtok_r(text, ",", &rest); each; each = strtok_r(NULL, ",", &rest)) {
    char *value = strchr(each, '=');
    long long number;
    size_t i = 0;
    if (value) *value++ = 0;
    while (i < sizeof fields / sizeof *fields && (!value || strcmp(fields[i].name, each))) i++;
    if (i == sizeof fields / sizeof *fields) return "a limit is the name of a field of Limits, = and a number";
    if (fields[i].seconds ? !parse_seconds(value, fields[i].seconds) : !parse_number(value, 1, INT32_MAX, &number)) return "a limit is not a positive number";
    if (fields[i].number) *fields[i].number = (int)number;
  }
  if (limits->direct_depth > MAX_DEPTH || limits->borrowed_per_rail > MAX_DEPTH) return "more than 32 chunks outstanding on a rail";
  return NULL;
}

static const char *parse_policy(struct host *host, char *text) {
  host->policy = !strcmp(text, "direct") ? DIRECT : !strcmp(text, "spray") ? SPRAY : FUSELINK;
  return host->policy != FUSELINK || !strcmp(text, "fuselink") ? NULL : "it is not one of fuselink, spray, direct";
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

static const char *variable(const char *name) {
  const char *value = getenv(name);
  return value && *value ? value : NULL;
}

/* Read the environment; false after saying what is wrong with which variable. */
static bool configure(struct host *host) {
  const struct { const char *name; const char *(*parse)(struct host *host, char *text); } variables[] = {
      {variable("FUSCO_NCCL_WORKER") ? "FUSCO_NCCL_WORKER" : "LOCAL_RANK", parse_worker}, {"FUSCO_NCCL_RAILS", parse_rails},
      {"FUSCO_NCCL_LIMITS", parse_limits}, {"FUSCO_NCCL_POLICY", parse_policy}, {"FUSCO_NCCL_TIMEOUT_S", parse_timeout},
      {"FUSCO_NCCL_THREADS", parse_threads}};
  host->timeout_s = 60;
  host->limits = (struct limits){512 * 1024, 2, 4, 2, 8, 0.001, 0.010, 0.002, 0.3, 3.0};
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
    const char *name = variables[i].name, *value = variable(name), *problem;
    char text[4096];
    if (!value && variables[i].parse != parse_rails) continue;
    snprintf(text, sizeof text, "%s", value ? value : "");
    problem = !value || strlen(value) < sizeof text ? variables[i].parse(host, text) : "it is too long";
    if (!problem) continue;
    say(true, "%s: %s (worker %d, %s=%s)", name, problem, host->worker, name, value ? value : "");
    return false;
  }
  for (int i = 0; i < host->num_rails; i++) {
    double chunks_s = host->rails[i].bits_per_s ? 16.0 * host->limits.chunk_bytes / (double)host->rails[i].bits_per_s : 0;
    host->rails[i].hold_ns = (int64_t)(1e9 * (chunks_s > host->limits.hold_s ? chunks_s : host->limits.hold_s));
  }
  return true;
}

/* ---- life ---- */

static int count_loops(const struct host *host) {
  const char *local = variable("LOCAL_WORLD_SIZE");
  long cores = sysconf(_SC_NPROCESSORS_ONLN), workers = local ? atol(local) : 1;
  long num = cores / (2 * (workers > 0 ? workers : 1));
  if (host->num_loops) return host->num_loops;
  if (num > host->num_rails) num = host->num_rails;
  return num < 1 ? 1 : num > 4 ? 4 : (int)num;
}

static bool end_threads(struct host *host);
static void end(struct host *host);

static bool start(struct host *host) {
  char why[1536];
  host->pid = getpid();
  host->num_loops = count_loops(host);
  host->loops = calloc((size_t)host->num_loops, sizeof *host->loops);
  host->query_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  pthread_mutex_init(&host->lock, NULL);
  random_bytes(&host->num_listens, sizeof host->num_listens);
  if (!host->loops) abort();
  if (host->query_fd < 0) {
    snprintf(why, sizeof why, "cannot make a socket to look at links: %s", strerror(errno));
    goto failed;
  }
  if (!board_open(&host->board, variable("FUSCO_NCCL_BOARD"), host->timeout_s, why, sizeof why)) goto failed;
  if (!board_register(&host->board, host, why, sizeof why) || !joining_listen(host, why, sizeof why)) {
    board_close(&host->board);
    goto failed;
  }
  the_host = host;
  host_check_links();
  for (int i = 0; i < host->num_loops; i++) {
    if (loop_start(host->loops + i, i)) continue;
    say(true, "thread %d of %d could not be started: %s", i + 1, host->num_loops, strerror(errno));
    for (int j = 0; j < i; j++) loop_stop(host->loops + j);
    host->num_loops = i + 1;
    end(host);
    return false;
  }
  for (int i = 0; i < host->num_rails; i++) {
    const char *problem = loop_add(host->loops, &host->listeners[i]->watched, EPOLLIN);
    if (!problem) continue;
    say(true, "cannot wait for connections on %s: %s", host->rails[i].interface, problem);
    end_threads(host);
    end(host);
    return false;
  }
  say(false, "worker %d of this host, %d rails, %d threads, board %s", host->worker, host->num_rails, host->num_loops, host->board.path);
  return true;
failed:
  say(true, "%s", why);
  if (host->query_fd >= 0) close(host->query_fd);
  free(host->loops);
  return false;
}

static bool end_threads(struct host *host) {
  if (host->pid != getpid()) return false; /* a fork: the threads and the row are the parent's */
  for (int i = 0; i < host->num_loops; i++) loop_stop(host->loops + i);
  return true;
}

/* After end_threads. */
static bool has_channels(const struct host *host) {
  for (int i = 0; i < host->num_loops; i++) {
    if (host->loops[i].channels || host->loops[i].ready) return true;
  }
  return false;
}

/* Close and free all but the host itself, after end_threads. */
static void end(struct host *host) {
  joining_stop(host);
  while (host->listens) {
    struct listen *listen = host->listens;
    host->listens = listen->next;
    free(listen->names);
    free(listen);
  }
  for (int i = 0; i < host->num_loops; i++) loop_free(host->loops + i);
  board_close(&host->board);
  close(host->query_fd);
  free(host->loops);
  the_host = NULL;
}

static void release(struct host *host) {
  end(host);
  free(host);
}

bool host_acquire(void) {
  bool works = true;
  pthread_mutex_lock(&users);
  if (!the_host) {
    struct host *host = calloc(1, sizeof *host);
    works = host && configure(host) && start(host);
    if (!works) free(host);
  }
  if (works) the_host->num_users++;
  pthread_mutex_unlock(&users);
  return works;
}

void host_release(void) {
  pthread_mutex_lock(&users);
  if (the_host && !--the_host->num_users && end_threads(the_host)) release(the_host);
  pthread_mutex_unlock(&users);
}

/* Before version 11, NCCL does not say when it is done; this also runs when the library is unloaded. */
__attribute__((destructor)) static void at_exit(void) {
  say_no_more();
  if (!the_host || !end_threads(the_host)) return;
  if (has_channels(the_host)) { /* the process ends, and NCCL's threads may still use them */
    board_leave(&the_host->board);
  } else {
    release(the_host);
  }
}

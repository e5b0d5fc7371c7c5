/* The tables by which NCCL calls a network plugin, versions 10 (NCCL 2.26, 2.27) and 11 (from 2.28 on).
 *
 * Sizes, order and meaning of the fields are those that NCCL documents in src/include/plugin/net/net_v10.h and
 * net_v11.h of https://github.com/NVIDIA/nccl; a test compares sizes and offsets.
 */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_REQUESTS = 32, HANDLE_BYTES = 128, CLOSE_LIMIT_S = 5 };
enum { HOST_POINTERS = 1, LOG_WARN = 2, LOG_INFO = 3, LOG_NET = 0x10, MAX_DEVICES_OF_NIC = 4, ANY_SPEED_MBITS = 10000 };
static const int64_t SPREAD_NS = 250000000; /* after the first rail, the others get this long before connect returns */

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct properties_v10 {
  char *name, *pci_path;
  uint64_t guid;
  int pointers, is_registration_global, forces_flush, speed_mbits, port;
  float latency_us;
  int max_comms, max_receives, device_type, device_version;
  struct { int num; int devices[MAX_DEVICES_OF_NIC]; } virtual_nic;
  size_t max_p2p_bytes, max_collective_bytes;
};
struct properties_v11 {
  struct properties_v10 base;
  int max_requests_of_multi;
};

struct table_v10 {
  const char *name;
  int (*init)(logger log, void *profile);
  int (*devices)(int *num);
  int (*properties)(int device, struct properties_v10 *properties);
  int (*listen)(int device, void *handle, void **listen);
  int (*connect)(int device, void *config, void *handle, void **comm, void **device_comm);
  int (*accept)(void *listen, void **comm, void **device_comm);
  int (*register_memory)(void *comm, void *data, size_t size, int type, void **memory);
  int (*register_dmabuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **memory);
  int (*deregister_memory)(void *comm, void *memory);
  int (*isend)(void *comm, void *data, size_t size, int tag, void *memory, void *profile, void **request);
  int (*irecv)(void *comm, int num, void **data, size_t *sizes, int *tags, void **memory, void **profile, void **request);
  int (*iflush)(void *comm, int num, void **data, int *sizes, void **memory, void **request);
  int (*test)(void *request, int *done, int *sizes);
  int (*close_send)(void *comm);
  int (*close_receive)(void *comm);
  int (*close_listen)(void *listen);
  int (*device_memory)(void *comm, void *memory, void **device_memory);
  int (*receive_consumed)(void *comm, int num, void *request);
  int (*make_virtual)(int *device, void *properties);
};
struct table_v11 {
  const char *name;
  int (*init)(void **context, uint64_t id, void *config, logger log, void *profile);
  int (*devices)(int *num);
  int (*properties)(int device, struct properties_v11 *properties);
  int (*listen)(void *context, int device, void *handle, void **listen);
  int (*connect)(void *context, int device, void *handle, void **comm, void **device_comm);
  int (*accept)(void *listen, void **comm, void **device_comm);
  int (*register_memory)(void *comm, void *data, size_t size, int type, void **memory);
  int (*register_dmabuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **memory);
  int (*deregister_memory)(void *comm, void *memory);
  int (*isend)(void *comm, void *data, size_t size, int tag, void *memory, void *profile, void **request);
  int (*irecv)(void *comm, int num, void **data, size_t *sizes, int *tags, void **memory, void **profile, void **request);
  int (*iflush)(void *comm, int num, void **data, int *sizes, void **memory, void **request);
  int (*test)(void *request, int *done, int *sizes);
  int (*close_send)(void *comm);
  int (*close_receive)(void *comm);
  int (*close_listen)(void *listen);
  int (*device_memory)(void *comm, void *memory, void **device_memory);
  int (*receive_consumed)(void *comm, int num, void *request);
  int (*make_virtual)(int *device, void *properties);
  int (*finalize)(void *context);
  int (*set_attributes)(void *context, void *attributes);
};
_Static_assert(sizeof(struct table_v10) == 160 && sizeof(struct properties_v10) == 104, "NCCL, version 10");
_Static_assert(sizeof(struct table_v11) == 176 && sizeof(struct properties_v11) == 112, "NCCL, version 11");

enum { SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 }; /* ncclResult_t */

/* What listen writes and a peer's connect reads. `connecting` is this process's channel until connect has returned it. */
struct handle {
  char magic[4];
  uint32_t number;
  uint64_t connecting;
  uint8_t secret[SECRET_BYTES];
  uint32_t chunk_bytes;
  uint16_t worker, port;
  uint8_t num_rails, is_ipv6;
  uint8_t addresses[HANDLE_BYTES - 58];
};
_Static_assert(sizeof(struct handle) == HANDLE_BYTES, "NCCL's limit");
static const char MAGIC[4] = "FRH1";

/* NCCL's results, by those of the engine. */
static const int RESULTS[] = {0, INVALID_USAGE, INTERNAL_ERROR, REMOTE_ERROR, REMOTE_ERROR, INTERNAL_ERROR, INTERNAL_ERROR};

struct comm { /* one direction of a channel is used */
  struct channel *channel;
  struct request requests[MAX_REQUESTS];
};

static _Atomic(logger) the_log;
static struct host *the_host;
static int num_users;
static pthread_mutex_t users = PTHREAD_MUTEX_INITIALIZER;

static void print(bool warns, const char *text) {
  logger log = the_log;
  if (log) log(warns ? LOG_WARN : LOG_INFO, LOG_NET, "fusco rails", 0, "fusco rails: %s", text);
}

static const char *variable(const char *name) {
  const char *value = getenv(name);
  return value && *value ? value : NULL;
}

/* A thread for every two cores of this process's share. */
static int count_loops(void) {
  const char *local = variable("LOCAL_WORLD_SIZE");
  long cores = sysconf(_SC_NPROCESSORS_ONLN), workers = local ? atol(local) : 1;
  long num = cores / (2 * (workers > 0 ? workers : 1));
  return num < 1 ? 1 : num > 4 ? 4 : (int)num;
}

static struct host *start(void) {
  const char *worker = variable("FUSCO_NCCL_WORKER");
  struct config config = {
      .worker = worker ? worker : variable("LOCAL_RANK"), .rails = variable("FUSCO_NCCL_RAILS"), .limits = variable("FUSCO_NCCL_LIMITS"),
      .policy = variable("FUSCO_NCCL_POLICY"), .timeout_s = variable("FUSCO_NCCL_TIMEOUT_S"), .threads = variable("FUSCO_NCCL_THREADS"),
      .board = variable("FUSCO_NCCL_BOARD")};
  char why[WHY_BYTES];
  struct host *host = host_open(&config, true, count_loops(), print, why);
  if (!host || !host_start(host, why)) {
    print(true, why);
    return NULL;
  }
  say(host, false, "worker %d of this host, %d rails, %d threads, board %s", host->worker, host->sharing.num_rails, host->num_loops, host->sharing.board.path);
  return host;
}

static int init(logger log) {
  the_log = log;
  pthread_mutex_lock(&users);
  if (!the_host) the_host = start();
  bool works = the_host != NULL;
  num_users += works;
  pthread_mutex_unlock(&users);
  return works ? 0 : SYSTEM_ERROR;
}
static int init_v10(logger log, void *profile) {
  (void)profile;
  return the_host ? 0 : init(log); /* once for all communicators: it is never finalized */
}
static int init_v11(void **context, uint64_t id, void *config, logger log, void *profile) {
  (void)id, (void)config, (void)profile;
  *context = NULL;
  return init(log);
}
static int finalize(void *context) {
  (void)context;
  pthread_mutex_lock(&users);
  if (the_host && !--num_users) {
    host_close(the_host);
    the_host = NULL;
  }
  pthread_mutex_unlock(&users);
  return 0;
}

/* Before version 11, NCCL does not say when it is done; this also runs when the library is unloaded. */
__attribute__((destructor)) static void at_exit(void) {
  the_log = NULL;
  host_stop_all();
}

/* One device: rails are chosen for each chunk, so NCCL has nothing to choose. */
static int devices(int *num) {
  *num = 1;
  return 0;
}

static int properties_v10(int device, struct properties_v10 *properties) {
  uint64_t bits_per_s = 0;
  if (device || !the_host) return INVALID_ARGUMENT;
  for (int i = 0; i < the_host->sharing.num_rails; i++) bits_per_s += the_host->rails[i].named.bits_per_s;
  *properties = (struct properties_v10){
      .name = "rails", .guid = 1, .pointers = HOST_POINTERS, .is_registration_global = 1, .port = 1,
      .speed_mbits = bits_per_s ? (int)(bits_per_s / 1000000) : ANY_SPEED_MBITS * the_host->sharing.num_rails,
      .max_comms = 65536, .max_receives = 1, .virtual_nic = {1, {0}}, .max_p2p_bytes = 1ull << 40, .max_collective_bytes = 1ull << 40};
  return 0;
}
static int properties_v11(int device, struct properties_v11 *properties) {
  properties->max_requests_of_multi = 1;
  return properties_v10(device, &properties->base);
}

static int listen_v10(int device, void *opaque, void **comm) {
  *comm = NULL;
  if (device || !the_host) return INVALID_ARGUMENT;
  struct listen *listen = joining_offer(the_host);
  struct handle handle = {.number = listen->number, .chunk_bytes = (uint32_t)the_host->sharing.limits.chunk_bytes, .worker = (uint16_t)the_host->worker,
                          .port = (uint16_t)the_host->ports[0], .num_rails = (uint8_t)the_host->sharing.num_rails,
                          .is_ipv6 = the_host->rails[0].address.ss_family == AF_INET6};
  memcpy(handle.magic, MAGIC, sizeof MAGIC);
  memcpy(handle.secret, listen->secret, SECRET_BYTES);
  for (int i = 0; i < the_host->sharing.num_rails; i++) {
    const struct sockaddr_storage *address = &the_host->rails[i].address;
    if (handle.is_ipv6) {
      memcpy(handle.addresses + 16 * i, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
    } else {
      memcpy(handle.addresses + 4 * i, &((const struct sockaddr_in *)address)->sin_addr, 4);
    }
  }
  memcpy(opaque, &handle, sizeof handle);
  *comm = listen;
  return 0;
}
static int listen_v11(void *context, int device, void *handle, void **comm) {
  (void)context;
  return listen_v10(device, handle, comm);
}

static void read_address(const struct handle *handle, int rail, struct sockaddr_storage *address) {
  if (handle->is_ipv6) {
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(handle->port);
    memcpy(&v6->sin6_addr, handle->addresses + 16 * rail, 16);
  } else {
    struct sockaddr_in *v4 = (struct sockaddr_in *)address;
    v4->sin_family = AF_INET;
    v4->sin_port = htons(handle->port);
    memcpy(&v4->sin_addr, handle->addresses + 4 * rail, 4);
  }
}

/* Begin to connect; NULL for a handle that no listen has made. */
static struct channel *dial(const struct handle *handle) {
  bool is_ipv6 = the_host->rails[0].address.ss_family == AF_INET6;
  int most = handle->is_ipv6 ? 4 : MAX_RAILS;
  if (memcmp(handle->magic, MAGIC, sizeof MAGIC) || !handle->num_rails || handle->num_rails > most || !handle->chunk_bytes) {
    say(the_host, true, "the peer does not use fusco's rails, or another version: its handle is not one of theirs");
    return NULL;
  }
  if ((bool)handle->is_ipv6 != is_ipv6) {
    say(the_host, true, "the rails of this host have %s addresses, those of the peer %s", is_ipv6 ? "IPv6" : "IPv4", is_ipv6 ? "IPv4" : "IPv6");
    return NULL;
  }
  uint8_t name[NAME_BYTES];
  random_bytes(name, sizeof name);
  memcpy(name, &handle->number, sizeof handle->number);
  struct channel *channel = channel_new(the_host, handle->worker, handle->num_rails, handle->chunk_bytes, name, handle->secret);
  for (int rail = 0; rail < channel->num_rails; rail++) {
    read_address(handle, rail, channel->peer_address + rail);
    channel->peer_address_bytes[rail] = is_ipv6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
  }
  channel_dial(channel);
  return channel;
}

static struct comm *comm_of(struct channel *channel) {
  struct comm *comm = calloc(1, sizeof *comm);
  if (!comm) abort();
  comm->channel = channel;
  return comm;
}

static int connect_v10(int device, void *config, void *opaque, void **comm, void **device_comm) {
  struct handle *handle = opaque;
  (void)config, (void)device_comm;
  *comm = NULL;
  if (device || !the_host) return INVALID_ARGUMENT;
  pthread_mutex_lock(&the_host->lock);
  struct channel *channel = the_host->named; /* where a dialling channel is found until it is connected */
  while (channel && !(channel->dials && channel->id == handle->connecting)) channel = channel->next_named;
  pthread_mutex_unlock(&the_host->lock);
  if (!channel) {
    if (!(channel = dial(handle))) return INVALID_USAGE;
    handle->connecting = channel->id;
    return 0;
  }
  if (channel->error) {
    int error = RESULTS[channel->error];
    handle->connecting = 0;
    channel_close(channel, true);
    return error;
  }
  int64_t first_ns = channel->first_connected_ns;
  bool has_all = channel->usable == (1u << channel->num_rails) - 1;
  if (has_all || (first_ns && now_ns() - first_ns > SPREAD_NS)) {
    handle->connecting = 0;
    *comm = comm_of(channel);
  }
  return 0;
}
static int connect_v11(void *context, int device, void *handle, void **comm, void **device_comm) {
  return connect_v10(device, context, handle, comm, device_comm);
}

static int accept_comm(void *listen, void **comm, void **device_comm) {
  (void)device_comm;
  struct channel *channel = joining_accepted(the_host, listen);
  *comm = channel ? comm_of(channel) : NULL;
  return 0;
}

static int register_memory(void *comm, void *data, size_t size, int type, void **memory) {
  (void)comm, (void)data, (void)size;
  *memory = NULL;
  if (type == HOST_POINTERS) return 0;
  say(the_host, true, "memory of type %d was offered, but rails move host memory (type 1) only", type);
  return INVALID_USAGE;
}
static int register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **memory) {
  (void)offset, (void)fd;
  return register_memory(comm, data, size, type, memory);
}
static int deregister_memory(void *comm, void *memory) {
  (void)comm, (void)memory;
  return 0;
}

static int failed(struct channel *channel, int error) {
  if (!channel->is_told) say(the_host, true, "worker %d: %s", the_host->worker, channel->reason);
  channel->is_told = true;
  return RESULTS[error];
}

static int post(struct comm *comm, bool is_receive, void *data, size_t size, void **opaque) {
  struct request *request = comm->requests;
  int error = comm->channel->error;
  *opaque = NULL;
  if (error) return failed(comm->channel, error);
  while (request < comm->requests + MAX_REQUESTS && request->state != IS_FREE) request++;
  if (request == comm->requests + MAX_REQUESTS) return 0; /* as many as NCCL may have */
  request->is_receive = is_receive;
  request->data = data;
  request->size = size;
  error = messages_post(comm->channel, request);
  if (error) {
    request->state = IS_FREE;
    return failed(comm->channel, error);
  }
  *opaque = request;
  return 0;
}
static int isend(void *comm, void *data, size_t size, int tag, void *memory, void *profile, void **request) {
  (void)tag, (void)memory, (void)profile;
  return post(comm, false, data, size, request);
}
static int irecv(void *comm, int num, void **data, size_t *sizes, int *tags, void **memory, void **profile, void **request) {
  (void)tags, (void)memory, (void)profile;
  return num == 1 ? post(comm, true, data[0], sizes[0], request) : INVALID_ARGUMENT;
}
static int iflush(void *comm, int num, void **data, int *sizes, void **memory, void **request) {
  (void)comm, (void)num, (void)data, (void)sizes, (void)memory;
  *request = NULL; /* what has arrived in host memory is there */
  return 0;
}

static int test(void *opaque, int *done, int *sizes) {
  struct request *request = opaque;
  unsigned state = request->state;
  *done = state == IS_DONE && !request->result;
  if (state == IS_DONE && request->result) return RESULTS[request->result];
  if (state != IS_DONE) return state == IS_FREE ? INTERNAL_ERROR : 0;
  if (sizes) sizes[0] = (int)request->num_bytes;
  request->state = IS_FREE;
  return 0;
}

/* Afterwards the memory of its requests is the caller's again. */
static int close_comm(void *opaque) {
  struct comm *comm = opaque;
  if (!comm) return 0;
  channel_close(comm->channel, false);
  for (int64_t end = now_ns() + CLOSE_LIMIT_S * 1000000000ll; !comm->channel->is_closed; usleep(50)) {
    if (now_ns() < end) continue;
    say(the_host, true, "a channel could not be closed within %d s; its memory is kept", CLOSE_LIMIT_S);
    return 0;
  }
  channel_close(comm->channel, true);
  free(comm);
  return 0;
}

static int close_listen(void *listen) {
  joining_withdraw(the_host, listen);
  return 0;
}

#define EXPORTED __attribute__((visibility("default")))

EXPORTED const struct table_v10 ncclNetPlugin_v10 = {
    "fusco", init_v10, devices, properties_v10, listen_v10, connect_v10, accept_comm, register_memory, register_dmabuf, deregister_memory,
    isend, irecv, iflush, test, close_comm, close_comm, close_listen, NULL, NULL, NULL};
EXPORTED const struct table_v11 ncclNetPlugin_v11 = {
    "fusco", init_v11, devices, properties_v11, listen_v11, connect_v11, accept_comm, register_memory, register_dmabuf, deregister_memory,
    isend, irecv, iflush, test, close_comm, close_comm, close_listen, NULL, NULL, NULL, finalize, NULL};

/* The tables by which NCCL calls a network plugin, versions 10 (NCCL 2.26, 2.27) and 11 (from 2.28 on).
 *
 * Sizes, order and meaning of the fields are those that NCCL documents in src/include/plugin/net/net_v10.h and
 * net_v11.h of https://github.com/NVIDIA/nccl; a test compares sizes and offsets.
 */
#include "rails.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static _Atomic(logger) the_log;

void say(bool warns, const char *format, ...) {
  char text[2048];
  logger log = the_log;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (log) log(warns ? LOG_WARN : LOG_INFO, LOG_NET, "fusco rails", 0, "fusco rails: %s", text);
}

void say_no_more(void) { the_log = NULL; }

static int init(logger log) {
  the_log = log;
  return host_acquire() ? SUCCESS : SYSTEM_ERROR;
}
static int init_v10(logger log, void *profile) {
  (void)profile;
  return the_host ? SUCCESS : init(log); /* once for all communicators: it is never finalized */
}
static int init_v11(void **context, uint64_t id, void *config, logger log, void *profile) {
  (void)id, (void)config, (void)profile;
  *context = NULL;
  return init(log);
}
static int finalize(void *context) {
  (void)context;
  host_release();
  return SUCCESS;
}

/* One device: rails are chosen for each chunk, so NCCL has nothing to choose. */
static int devices(int *num) {
  *num = 1;
  return SUCCESS;
}

static int properties_v10(int device, struct properties_v10 *properties) {
  uint64_t bits_per_s = 0;
  if (device || !the_host) return INVALID_ARGUMENT;
  for (int i = 0; i < the_host->num_rails; i++) bits_per_s += the_host->rails[i].bits_per_s;
  *properties = (struct properties_v10){
      .name = "rails", .guid = 1, .pointers = HOST_POINTERS, .is_registration_global = 1, .port = 1,
      .speed_mbits = bits_per_s ? (int)(bits_per_s / 1000000) : ANY_SPEED_MBITS * the_host->num_rails,
      .max_comms = 65536, .max_receives = 1, .virtual_nic = {1, {0}}, .max_p2p_bytes = 1ull << 40, .max_collective_bytes = 1ull << 40};
  return SUCCESS;
}
static int properties_v11(int device, struct properties_v11 *properties) {
  properties->max_requests_of_multi = 1;
  return properties_v10(device, &properties->base);
}

static int listen_v10(int device, void *opaque, void **comm) {
  *comm = NULL;
  if (device || !the_host) return INVALID_ARGUMENT;
  struct listen *listen = calloc(1, sizeof *listen);
  if (!listen) return SYSTEM_ERROR;
  random_bytes(listen->secret, SECRET_BYTES);
  pthread_mutex_lock(&the_host->lock);
  listen->number = ++the_host->num_listens;
  listen->next = the_host->listens;
  the_host->listens = listen;
  pthread_mutex_unlock(&the_host->lock);
  struct handle handle = {.number = listen->number, .chunk_bytes = (uint32_t)the_host->limits.chunk_bytes, .worker = (uint16_t)the_host->worker,
                          .port = (uint16_t)the_host->port, .num_rails = (uint8_t)the_host->num_rails,
                          .is_ipv6 = the_host->rails[0].address.ss_family == AF_INET6};
  memcpy(handle.magic, MAGIC, sizeof MAGIC);
  memcpy(handle.secret, listen->secret, SECRET_BYTES);
  for (int i = 0; i < the_host->num_rails; i++) {
    const struct sockaddr_storage *address = &the_host->rails[i].address;
    if (handle.is_ipv6) {
      memcpy(handle.addresses + 16 * i, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
    } else {
      memcpy(handle.addresses + 4 * i, &((const struct sockaddr_in *)address)->sin_addr, 4);
    }
  }
  memcpy(opaque, &handle, sizeof handle);
  *comm = listen;
  return SUCCESS;
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
    say(true, "the peer does not use fusco's rails, or another version: its handle is not one of theirs");
    return NULL;
  }
  if ((bool)handle->is_ipv6 != is_ipv6) {
    say(true, "the rails of this host have %s addresses, those of the peer %s", is_ipv6 ? "IPv6" : "IPv4", is_ipv6 ? "IPv4" : "IPv6");
    return NULL;
  }
  pthread_mutex_lock(&the_host->lock);
  struct loop *loop = the_host->loops + the_host->next_loop++ % (unsigned)the_host->num_loops;
  pthread_mutex_unlock(&the_host->lock);
  struct channel *channel = channel_new(loop);
  random_bytes(channel->name, NAME_BYTES);
  memcpy(channel->name, &handle->number, sizeof handle->number);
  memcpy(channel->secret, handle->secret, SECRET_BYTES);
  channel->peer = handle->worker;
  channel->num_rails = handle->num_rails < the_host->num_rails ? handle->num_rails : the_host->num_rails;
  channel->peer_chunk_bytes = handle->chunk_bytes;
  channel->dials = true;
  for (int rail = 0; rail < channel->num_rails; rail++) read_address(handle, rail, channel->peer_address + rail);
  loop_kick(channel, false);
  return channel;
}

static int connect_v10(int device, void *config, void *opaque, void **comm, void **device_comm) {
  struct handle *handle = opaque;
  (void)config, (void)device_comm;
  *comm = NULL;
  if (device || !the_host) return INVALID_ARGUMENT;
  pthread_mutex_lock(&the_host->lock);
  struct channel **at = &the_host->named, *channel; /* a dialling channel is found here until it is connected */
  while (*at && !((*at)->dials && (*at)->id == handle->connecting)) at = &(*at)->next_named;
  channel = *at;
  pthread_mutex_unlock(&the_host->lock);
  if (!channel) {
    if (!(channel = dial(handle))) return INVALID_USAGE;
    handle->connecting = channel->id;
    pthread_mutex_lock(&the_host->lock);
    channel->next_named = the_host->named;
    the_host->named = channel;
    pthread_mutex_unlock(&the_host->lock);
    return SUCCESS;
  }
  int error = channel->error;
  if (error) {
    handle->connecting = 0;
    channel_close(channel);
    return error;
  }
  int64_t first_ns = channel->first_connected_ns;
  bool has_all = channel->usable == (1u << channel->num_rails) - 1;
  if (has_all || (first_ns && now_ns() - first_ns > SPREAD_NS)) {
    handle->connecting = 0;
    *comm = channel;
  }
  return SUCCESS;
}
static int connect_v11(void *context, int device, void *handle, void **comm, void **device_comm) {
  return connect_v10(device, context, handle, comm, device_comm);
}

static int accept_comm(void *opaque, void **comm, void **device_comm) {
  struct listen *listen = opaque;
  (void)device_comm;
  pthread_mutex_lock(&the_host->lock);
  struct channel *channel = listen->accepted;
  if (channel) listen->accepted = channel->next_accepted;
  pthread_mutex_unlock(&the_host->lock);
  *comm = channel;
  return SUCCESS;
}

static int register_memory(void *comm, void *data, size_t size, int type, void **memory) {
  (void)comm, (void)data, (void)size;
  *memory = NULL;
  if (type == HOST_POINTERS) return SUCCESS;
  say(true, "memory of type %d was offered, but rails move host memory (type 1) only", type);
  return INVALID_USAGE;
}
static int register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **memory) {
  (void)offset, (void)fd;
  return register_memory(comm, data, size, type, memory);
}
static int deregister_memory(void *comm, void *memory) {
  (void)comm, (void)memory;
  return SUCCESS;
}

static int post(struct channel *channel, bool is_receive, void *data, size_t size, void **request) {
  *request = NULL;
  int error = channel->error;
  if (!error) *request = channel_post(channel, is_receive, data, size);
  return error;
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
  return SUCCESS;
}

static int test(void *opaque, int *done, int *sizes) {
  struct request *request = opaque;
  int state = atomic_load(&request->state);
  *done = state == IS_DONE;
  if (state == HAS_FAILED) return request->result;
  if (state != IS_DONE) return state == IS_FREE ? INTERNAL_ERROR : SUCCESS;
  if (sizes) sizes[0] = (int)request->size;
  atomic_store(&request->state, IS_FREE);
  return SUCCESS;
}

static int close_comm(void *comm) {
  if (comm) channel_close(comm);
  return SUCCESS;
}

static int close_listen(void *opaque) {
  struct listen *listen = opaque;
  pthread_mutex_lock(&the_host->lock);
  for (struct listen **at = &the_host->listens; *at; at = &(*at)->next) {
    if (*at == listen) {
      *at = listen->next;
      break;
    }
  }
  pthread_mutex_unlock(&the_host->lock);
  while (listen->accepted) { /* connected, but never accepted */
    struct channel *channel = listen->accepted;
    listen->accepted = channel->next_accepted;
    channel_close(channel);
  }
  free(listen->names);
  free(listen);
  return SUCCESS;
}

#define EXPORTED __attribute__((visibility("default")))

EXPORTED const struct table_v10 ncclNetPlugin_v10 = {
    "fusco", init_v10, devices, properties_v10, listen_v10, connect_v10, accept_comm, register_memory, register_dmabuf, deregister_memory,
    isend, irecv, iflush, test, close_comm, close_comm, close_listen, NULL, NULL, NULL};
EXPORTED const struct table_v11 ncclNetPlugin_v11 = {
    "fusco", init_v11, devices, properties_v11, listen_v11, connect_v11, accept_comm, register_memory, register_dmabuf, deregister_memory,
    isend, irecv, iflush, test, close_comm, close_comm, close_listen, NULL, NULL, NULL, finalize, NULL};

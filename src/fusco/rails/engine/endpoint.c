/* What fusco.rails calls (fusco/rails/binding.py). A function with `why` writes there what is wrong, and returns nothing. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

static pthread_mutex_t closing = PTHREAD_MUTEX_INITIALIZER; /* an endpoint does not end while a channel of it is released */

/* Without a thread, what was posted is begun at once. */
static void begin(struct host *host) {
  if (!host->loops->is_started) loop_take_ready(host->loops);
}

EXPORTED struct host *rails_open(const struct config *config, bool is_polled, char *why) {
  struct host *host = host_open(config, false, 1, NULL, why);
  return host && (is_polled || host_start(host, why)) ? host : NULL;
}

EXPORTED void rails_close(struct host *host) {
  pthread_mutex_lock(&closing);
  host_close(host);
  pthread_mutex_unlock(&closing);
}

EXPORTED void rails_stop(void) { host_stop_all(); }

EXPORTED int64_t rails_poll(struct host *host) { return loop_poll(host->loops); }

EXPORTED int rails_fileno(const struct host *host) { return host->loops->epoll_fd; }

EXPORTED bool rails_wait(struct host *host, uint32_t seen, int64_t limit_ns) { return host_wait(host, seen, limit_ns); }

EXPORTED struct listen *rails_listen(struct host *host, uint8_t *secret, int *ports, char *why) {
  if (!joining_listen(host, why) || !joining_begin(host, why)) return NULL;
  struct listen *listen = joining_offer(host);
  memcpy(secret, listen->secret, SECRET_BYTES);
  memcpy(ports, host->ports, sizeof host->ports);
  return listen;
}

EXPORTED struct channel *rails_accept(struct host *host, struct listen *listen) { return joining_accepted(host, listen); }

struct peer { /* fusco.rails.Address */
  int worker, num_rails;
  uint32_t chunk_bytes;
  int ports[MAX_RAILS];
  const char *addresses[MAX_RAILS];
  uint8_t secret[SECRET_BYTES];
};

EXPORTED struct channel *rails_dial(struct host *host, const struct peer *peer, const uint8_t *name) {
  struct channel *channel = channel_new(host, peer->worker, peer->num_rails, peer->chunk_bytes, name, peer->secret);
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct sockaddr_storage *address = channel->peer_address + rail;
    parse_ip(peer->addresses[rail], address, channel->peer_address_bytes + rail);
    set_port(address, peer->ports[rail]);
  }
  channel_dial(channel);
  begin(host);
  return channel;
}

EXPORTED int rails_post(struct channel *channel, struct request *request) {
  struct host *host = channel->host;
  int error = messages_post(channel, request);
  if (!error) begin(host);
  return error;
}

/* What was written before an atomic field was is seen after this: loads of an interpreter have no order of their own. */
EXPORTED uint32_t rails_acquire(const atomic_uint *field) { return atomic_load_explicit(field, memory_order_acquire); }

EXPORTED bool rails_wait_for(struct request *request, int64_t limit_ns) { return request_wait(request, limit_ns); }

EXPORTED void rails_close_channel(struct channel *channel) {
  struct host *host = channel->host;
  channel_close(channel, false);
  if (host) begin(host);
}

EXPORTED void rails_give_up(struct channel *channel, const char *reason) {
  struct host *host = channel->host;
  if (!host) return;
  pthread_mutex_lock(&channel->loop->lock);
  if (!channel->gives_up) channel->gives_up = strdup(reason);
  pthread_mutex_unlock(&channel->loop->lock);
  loop_kick(channel, false, false);
  begin(host);
}

EXPORTED void rails_release(struct channel *channel) { /* its owner has forgotten it */
  pthread_mutex_lock(&closing);
  if (!channel->host || channel->host->pid == getpid()) channel_close(channel, true);
  pthread_mutex_unlock(&closing);
}

/* ---- boards ---- */

EXPORTED struct board *rails_board_open(const char *path, double limit_s, char *why) {
  struct board *board = malloc(sizeof *board);
  if (!board) abort();
  if (board_open(board, path, limit_s, why)) return board;
  free(board);
  return NULL;
}

EXPORTED void rails_board_close(struct board *board) {
  board_close(board);
  free(board);
}

EXPORTED bool rails_board_follow(struct board *board, char *why) { return board_follow(board, why); }

EXPORTED bool rails_board_register(struct board *board, int worker, uint32_t direct, const struct named_rail *rails, int num_rails, double rest_s, char *why) {
  board->rest_ns = (int64_t)(1e9 * rest_s);
  return board_register(board, worker, direct, rails, num_rails, why);
}

EXPORTED void rails_board_leave(struct board *board) { board_leave(board); }
EXPORTED void rails_board_reset_dead(struct board *board) { board_reset_dead(board); }

/* ---- the scheduler by itself, for measurements and tests ---- */

EXPORTED int rails_choose(const struct view *view, int rule, const struct limits *limits) { return choose_rail(view, (enum rule)rule, limits); }

EXPORTED struct scheduler *rails_scheduler(struct host *host) { /* of a channel whose rails are all connected; free() it */
  struct scheduler *scheduler = malloc(sizeof *scheduler);
  if (!scheduler) abort();
  scheduler_init(scheduler, &host->sharing);
  scheduler->view.usable = (1u << host->sharing.num_rails) - 1;
  return scheduler;
}

EXPORTED int rails_scheduler_next(struct scheduler *scheduler) { return scheduler_next(scheduler); }
EXPORTED void rails_scheduler_completed(struct scheduler *scheduler, int rail, size_t num_bytes) { scheduler_completed(scheduler, rail, num_bytes); }
EXPORTED void rails_scheduler_credit(struct scheduler *scheduler, uint32_t idle, uint32_t epoch) { scheduler_credit(scheduler, idle, epoch); }
EXPORTED uint32_t rails_scheduler_idle(struct scheduler *scheduler) { /* looked up anew */
  uint32_t idle, epoch;
  scheduler->crediting.left = 0;
  scheduler_stamp(scheduler, &idle, &epoch);
  return idle;
}

/* A channel: messages between two workers over all rails of their hosts, in order; channel.py and its queues. */
#include "rails.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

static const int64_t RETRY_NS = 100000, /* a quarter of what a chunk takes at 10 Gbit/s */
                     RESCUE_NS = 5000000, CLOSING_NS = 1000000000, DRAINING_NS = 200000000;
enum {
  LATE = 4,
  CLOSE_LIMIT_S = 5,
  READ_BUDGET = 4 << 20 /* bytes read before other connections get their turn */
};

static uint32_t num_chunks(uint64_t num_bytes, uint32_t chunk_bytes) {
  return num_bytes ? (uint32_t)((num_bytes - 1) / chunk_bytes + 1) : 1; /* an empty message arrives, too */
}

static uint8_t *new_flags(uint32_t num) {
  uint8_t *flags = calloc(num, 1);
  if (!flags) abort();
  return flags;
}

static void finish(struct request *request, int result, size_t size) {
  request->result = result;
  request->size = size;
  atomic_store(&request->state, result == SUCCESS ? IS_DONE : HAS_FAILED);
}

/* ---- messages to send ---- */

const char *channel_payload(struct channel *channel, uint64_t seq, uint32_t chunk) {
  const struct outgoing *message = channel->out + seq % MAX_REQUESTS;
  if (!message->is_active || message->seq != seq || !message->is_granted || message->acked[chunk]) return NULL;
  return message->size && !message->is_too_large ? message->data + (size_t)chunk * (size_t)the_host->limits.chunk_bytes : "";
}

static uint32_t payload_bytes(const struct outgoing *message, uint32_t chunk) {
  uint64_t chunk_bytes = (uint64_t)the_host->limits.chunk_bytes, left = message->size - chunk * chunk_bytes;
  if (message->is_too_large) return 0;
  return (uint32_t)(left < chunk_bytes ? left : chunk_bytes);
}

static void take_grant(struct outgoing *message, uint64_t size) {
  message->is_granted = true;
  message->is_too_large = size < message->size;
  message->num_chunks = message->is_too_large ? 1 : num_chunks(message->size, (uint32_t)the_host->limits.chunk_bytes);
  message->num_left = message->num_chunks;
  message->acked = new_flags(message->num_chunks);
}

static const char *granted(struct channel *channel, uint64_t seq, uint64_t size) {
  struct outgoing *message = channel->out + seq % MAX_REQUESTS;
  if (seq >= channel->taken_sends + MAX_GRANTS) return "more buffers granted than a channel has";
  if (seq >= channel->taken_sends) {
    channel->granted[seq % MAX_GRANTS] = size + 1;
  } else if (message->is_active && message->seq == seq && !message->is_granted) {
    take_grant(message, size);
  }
  return NULL;
}

static void take_sends(struct channel *channel) {
  for (uint64_t num = channel->num_sends; channel->taken_sends < num; channel->taken_sends++) {
    uint64_t seq = channel->taken_sends, *early = channel->granted + seq % MAX_GRANTS;
    struct request *request = channel->sends + seq % MAX_REQUESTS;
    if (channel->error) {
      finish(request, channel->error, 0);
      continue;
    }
    struct outgoing *message = channel->out + seq % MAX_REQUESTS;
    *message = (struct outgoing){.seq = seq, .is_active = true, .data = request->data, .size = request->size};
    channel->num_active++;
    if (*early) take_grant(message, *early - 1);
    *early = 0;
  }
}

static void finish_send(struct channel *channel, struct outgoing *message, int result) {
  struct request *request = channel->sends + message->seq % MAX_REQUESTS;
  if (result == SUCCESS && message->is_too_large) {
    say(true, "a message of %zu bytes is larger than the buffer of the peer's receive", message->size);
    result = INVALID_USAGE;
  }
  message->is_active = false;
  channel->num_active--;
  free(message->acked);
  message->acked = NULL;
  finish(request, result, message->size);
}

static const char *acked(struct channel *channel, uint64_t seq, uint32_t chunk) {
  struct outgoing *message = channel->out + seq % MAX_REQUESTS;
  if (!message->is_active || message->seq != seq || !message->is_granted) return NULL; /* acknowledged over another rail */
  if (chunk >= message->num_chunks) return "the acknowledgement of a chunk that a message does not have";
  message->num_left -= !message->acked[chunk];
  message->acked[chunk] = 1;
  if (!message->num_left) finish_send(channel, message, SUCCESS);
  return NULL;
}

static void put_back(struct channel *channel, uint64_t seq, uint32_t chunk) {
  if (channel->again_begin == channel->again_end) channel->again_begin = channel->again_end = 0;
  if (channel->again_end == channel->again_room) {
    channel->again_room = 2 * channel->again_room + 16;
    channel->again = realloc(channel->again, channel->again_room * sizeof *channel->again);
    if (!channel->again) abort();
  }
  channel->again[channel->again_end].seq = seq;
  channel->again[channel->again_end++].chunk = chunk;
}

static bool has_chunk(const struct channel *channel) {
  if (channel->error || channel->closing_ns) return false;
  const struct outgoing *next = channel->out + channel->next_seq % MAX_REQUESTS;
  return channel->again_begin < channel->again_end || (channel->next_seq < channel->taken_sends && next->is_granted);
}

/* The next chunk to send; chunks that were lost come first. */
static bool pop(struct channel *channel, uint64_t *seq, uint32_t *chunk) {
  while (channel->again_begin < channel->again_end) {
    *seq = channel->again[channel->again_begin].seq;
    *chunk = channel->again[channel->again_begin++].chunk;
    if (channel_payload(channel, *seq, *chunk)) return true;
  }
  if (!has_chunk(channel)) return false;
  *seq = channel->next_seq;
  *chunk = channel->next_chunk++;
  if (channel->next_chunk == channel->out[*seq % MAX_REQUESTS].num_chunks) {
    channel->next_seq++;
    channel->next_chunk = 0;
  }
  return true;
}

static void count_passed(struct channel *channel) {
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_count_passed(channel->connections[rail]);
  }
}

void channel_pump(struct channel *channel) {
  if (channel_waits(channel)) count_passed(channel);
  while (channel->num_connections && has_chunk(channel)) {
    uint64_t seq;
    uint32_t chunk;
    int rail = schedule_choose(channel);
    if (rail == WAIT) break;
    if (!pop(channel, &seq, &chunk)) { /* what was left to send again has been acknowledged meanwhile */
      schedule_completed(channel, rail, 0);
      break;
    }
    struct connection *connection = channel->connections[rail];
    struct posted *posted = connection_find(connection, seq, chunk);
    if (posted) { /* it is late, but no other rail has room for a copy */
      schedule_completed(channel, rail, 0);
      posted->at_ns = now_ns();
      posted->is_late = false;
      continue;
    }
    if (connection->num_outstanding == MAX_OUTSTANDING) { /* the peer does not read; its credits come later */
      put_back(channel, seq, chunk);
      schedule_completed(channel, rail, 0);
      break;
    }
    connection->outstanding[connection->num_outstanding++] = (struct posted){
        .seq = seq, .chunk = chunk, .num_bytes = payload_bytes(channel->out + seq % MAX_REQUESTS, chunk), .at_ns = now_ns(), .is_queued = true};
  }
  channel_write(channel);
}

/* If a write fails, take what came before: acknowledgements, and word that the peer has left. NULL, or why it failed. */
static const char *write_or_read_rest(struct connection *connection) {
  const char *why = connection_write(connection);
  if (why) connection_read(connection, SSIZE_MAX);
  return why;
}

void channel_write(struct channel *channel) {
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *connection = channel->connections[rail];
    if (!connection || connection->wants_write || !connection_has_output(connection)) continue;
    const char *why = write_or_read_rest(connection);
    if (why) {
      channel_drop(connection, why, true);
    } else if (connection->wants_write) {
      loop_watch(channel->loop, &connection->watched, EPOLLIN | EPOLLOUT);
    }
  }
}

bool channel_waits(const struct channel *channel) { return channel->num_connections && has_chunk(channel); }

/* Send chunks again that are late on borrowed rails: their owners have begun to send. The first copy to arrive counts. */
static bool rescue(struct channel *channel, int64_t now) {
  bool borrows = false;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *connection = channel->connections[rail];
    if (!connection || !connection->num_outstanding || !host_defers(rail)) continue;
    borrows = true;
    connection_count_passed(connection);
    double limit_s = LATE * connection->typical_s, least_s = host_least_late_s(rail);
    int64_t limit_ns = (int64_t)(1e9 * (limit_s > least_s ? limit_s : least_s));
    for (int i = 0; i < connection->num_outstanding; i++) {
      struct posted *each = connection->outstanding + i;
      if (each->is_late || each->has_passed || now - each->at_ns <= limit_ns) continue;
      each->is_late = true;
      put_back(channel, each->seq, each->chunk);
    }
  }
  return borrows;
}

/* ---- receives ---- */

/* A credit with this host's idle rails, which are looked up anew for every batch. */
static struct record credit(struct channel *channel, uint16_t kind, uint64_t seq, uint64_t size, uint32_t slot) {
  if (batch_is_over(&channel->crediting)) {
    channel->idle_here = board_idle(&the_host->board, the_host, LAST_RX);
    batch_begin(&channel->crediting);
  }
  channel->crediting.left--;
  channel->epoch++;
  return (struct record){.seq = seq, .size = size, .slot = slot, .mask = channel->idle_here, .epoch = channel->epoch, .kind = kind};
}

static void grant(struct channel *channel, uint64_t seq) {
  struct record record = credit(channel, GRANT, seq, channel->in[seq % MAX_REQUESTS].size, 0);
  struct connection *best = NULL;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *each = channel->connections[rail];
    if (each && (!best || (connection_has_output(best) && !connection_has_output(each)))) best = each;
  }
  if (best) connection_credit(best, &record);
}

/* Grant all open receives: earlier grants may have been lost. Repeated ones have no effect. */
static void grant_again(struct channel *channel) {
  for (uint64_t seq = channel->first_receive; seq < channel->taken_receives; seq++) {
    if (channel->in[seq % MAX_REQUESTS].num_bytes < 0) grant(channel, seq);
  }
}

static void take_receives(struct channel *channel) {
  for (uint64_t num = channel->num_receives; channel->taken_receives < num; channel->taken_receives++) {
    uint64_t seq = channel->taken_receives;
    struct request *request = channel->receives + seq % MAX_REQUESTS;
    if (channel->error) {
      channel->first_receive = seq + 1;
      finish(request, channel->error, 0);
      continue;
    }
    channel->in[seq % MAX_REQUESTS] = (struct incoming){.data = request->data, .size = request->size, .num_bytes = -1};
    grant(channel, seq);
  }
}

/* Take the size of a message from its first chunk; NULL, or what is wrong. */
static const char *begin_receive(struct channel *channel, struct incoming *incoming, const struct record *record) {
  bool fits = record->size <= incoming->size;
  if (fits != (record->kind == DATA)) return "a message that claims to fit or not to fit, wrongly";
  incoming->num_bytes = (int64_t)record->size;
  incoming->num_chunks = incoming->num_left = fits ? num_chunks(record->size, channel->peer_chunk_bytes) : 1;
  incoming->arrived = new_flags(incoming->num_chunks);
  channel->num_begun++;
  return NULL;
}

char *channel_target(struct channel *channel, const struct record *record, bool *is_wanted, const char **why) {
  *is_wanted = false;
  if (record->seq < channel->first_receive || channel->closing_ns) return NULL;
  if (record->seq >= channel->taken_receives) {
    *why = "a chunk of a message for which no buffer was granted";
    return NULL;
  }
  struct incoming *incoming = channel->in + record->seq % MAX_REQUESTS;
  if (incoming->num_bytes < 0 && (*why = begin_receive(channel, incoming, record))) return NULL;
  uint64_t start = (uint64_t)record->slot * channel->peer_chunk_bytes, expected = 0;
  if (record->size != (uint64_t)incoming->num_bytes || record->slot >= incoming->num_chunks) {
    *why = "a chunk that its message does not have";
    return NULL;
  }
  if (incoming->arrived[record->slot]) return NULL;
  if (record->size <= incoming->size) {
    expected = record->size - start < channel->peer_chunk_bytes ? record->size - start : channel->peer_chunk_bytes;
  }
  if (record->mask != expected || (record->kind == DATA) != (record->size <= incoming->size)) {
    *why = "a chunk of a wrong size";
    return NULL;
  }
  *is_wanted = true;
  return incoming->data + (expected ? start : 0);
}

static void arrived(struct channel *channel, const struct record *record) {
  struct incoming *incoming = channel->in + record->seq % MAX_REQUESTS;
  if (record->seq < channel->first_receive || incoming->arrived[record->slot]) return;
  incoming->arrived[record->slot] = 1;
  incoming->num_left--;
  while (channel->first_receive < channel->taken_receives) { /* requests finish in order */
    struct request *request = channel->receives + channel->first_receive % MAX_REQUESTS;
    struct incoming *first = channel->in + channel->first_receive % MAX_REQUESTS;
    if (first->num_bytes < 0 || first->num_left) break;
    bool fits = (size_t)first->num_bytes <= first->size;
    if (!fits) say(true, "a receive has a buffer of %zu bytes, its message has %zu", first->size, (size_t)first->num_bytes);
    free(first->arrived);
    first->arrived = NULL;
    channel->first_receive++;
    channel->num_begun--;
    finish(request, fits ? SUCCESS : INVALID_USAGE, (size_t)first->num_bytes);
  }
}

/* ---- records ---- */

static const char *take_ack(struct connection *connection, const struct record *record) {
  struct channel *channel = connection->channel;
  schedule_credit(channel, record->mask, record->epoch);
  struct posted *posted = connection_find(connection, record->seq, record->slot);
  if (!posted || posted->is_queued) return "the acknowledgement of a chunk that was not sent";
  if (!posted->has_passed) connection_note_passed(connection, posted);
  connection_remove(connection, posted);
  return acked(channel, record->seq, record->slot);
}

const char *channel_take(struct connection *connection, const struct record *record, bool was_wanted) {
  struct channel *channel = connection->channel;
  if (record->kind == DATA || record->kind == TOO_LARGE) {
    if (channel->closing_ns) return NULL;
    struct record ack = credit(channel, ACK, record->seq, record->size, record->slot);
    connection_credit(connection, &ack);
    if (was_wanted) {
      board_received(&the_host->board, connection->rail, record->mask);
      arrived(channel, record);
    }
    return NULL;
  }
  if (record->kind == ACK) return take_ack(connection, record);
  if (record->kind == GRANT) {
    schedule_credit(channel, record->mask, record->epoch);
    return granted(channel, record->seq, record->size);
  }
  if (record->kind == RAIL_DOWN) {
    struct connection *failed = record->slot < MAX_RAILS ? channel->connections[record->slot] : NULL;
    if (failed && failed != connection && failed->incarnation == record->epoch) channel_drop(failed, "the peer says that it has failed", false);
    return NULL;
  }
  channel->peer_said_bye = true;
  return "the peer has closed the channel";
}

void channel_on_event(struct watched *watched, uint32_t events) {
  struct connection *connection = (struct connection *)watched;
  struct channel *channel = connection->channel;
  const char *why = NULL;
  if (events & EPOLLOUT) {
    why = write_or_read_rest(connection);
    if (!why && !connection->wants_write) loop_watch(channel->loop, watched, EPOLLIN);
  }
  if (!why && events & ~(uint32_t)EPOLLOUT) why = connection_read(connection, READ_BUDGET);
  if (why) channel_drop(connection, why, true);
  if (!channel->closing_ns) channel_write(channel); /* chunks follow, in turn with other channels */
}

/* ---- connections ---- */

void channel_end(struct connection *connection, bool aborts) {
  struct channel *channel = connection->channel;
  channel->connections[connection->rail] = NULL;
  channel->num_connections--;
  atomic_fetch_and(&channel->usable, ~(1u << connection->rail));
  for (int i = 0; i < connection->num_outstanding; i++) {
    if (!connection->outstanding[i].has_passed) schedule_completed(channel, connection->rail, 0);
  }
  connection->num_outstanding = 0;
  connection->is_closed = true;
  loop_forget(channel->loop, &connection->watched, aborts);
}

void channel_attach(struct channel *channel, int fd, int rail, uint32_t incarnation) {
  if (channel->connections[rail]) channel_drop(channel->connections[rail], "the peer has connected again", true);
  if (channel->error || channel->closing_ns) {
    close(fd);
    return;
  }
  struct connection *connection = connection_new(channel, fd, rail, incarnation);
  channel->connections[rail] = connection;
  channel->num_connections++;
  channel->without_rail_ns = 0;
  channel->was_connected = true;
  if (!channel->first_connected_ns) channel->first_connected_ns = now_ns();
  atomic_fetch_or(&channel->usable, 1u << rail);
  const char *why = loop_add(channel->loop, &connection->watched, EPOLLIN);
  if (why) {
    channel_drop(connection, why, true);
    return;
  }
  if (channel->num_connections == 1) grant_again(channel);
  channel_pump(channel);
}

void channel_drop(struct connection *connection, const char *reason, bool tells_peer) {
  struct channel *channel = connection->channel;
  if (connection->is_closed) return;
  struct record down = {.slot = (uint32_t)connection->rail, .epoch = connection->incarnation, .kind = RAIL_DOWN};
  channel->failures[connection->rail] = reason;
  for (int i = 0; i < connection->num_outstanding; i++) {
    put_back(channel, connection->outstanding[i].seq, connection->outstanding[i].chunk);
  }
  channel_end(connection, true);
  if (channel->closing_ns) return;
  if (channel->peer_said_bye && !channel->num_connections) {
    channel_fail(channel, REMOTE_ERROR, "the peer has closed its end");
    return;
  }
  for (int rail = 0; tells_peer && rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_credit(channel->connections[rail], &down);
  }
  grant_again(channel);
  channel_pump(channel);
}

static void fail_requests(struct channel *channel, int result) {
  atomic_store(&channel->error, result);
  for (int i = 0; i < MAX_REQUESTS; i++) {
    if (channel->out[i].is_active) finish_send(channel, channel->out + i, result);
  }
  for (; channel->first_receive < channel->taken_receives; channel->first_receive++) {
    struct incoming *incoming = channel->in + channel->first_receive % MAX_REQUESTS;
    free(incoming->arrived);
    incoming->arrived = NULL;
    finish(channel->receives + channel->first_receive % MAX_REQUESTS, result, 0);
  }
  channel->num_begun = 0;
  channel->again_begin = channel->again_end = 0;
}

void channel_fail(struct channel *channel, int result, const char *reason) {
  if (channel->error || channel->closing_ns) return;
  char states[1024] = "";
  size_t used = 0;
  for (int rail = 0; rail < channel->num_rails && used < sizeof states; rail++) {
    const struct rail *each = the_host->rails + rail;
    const char *state = channel->connections[rail] ? "connected" : channel->failures[rail] ? channel->failures[rail] : "never connected";
    used += (size_t)snprintf(states + used, sizeof states - used, "; rail %d (%s, %s): %s", rail, each->interface, each->text, state);
  }
  say(true, "worker %d lost worker %d of another host: %s%s", the_host->worker, channel->peer, reason, states);
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) channel_end(channel->connections[rail], true);
  }
  joining_give_up(channel);
  fail_requests(channel, result);
}

void channel_check(struct channel *channel, int64_t now, uint32_t links, bool *is_busy) {
  if (channel->closing_ns || channel->error) return;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *connection = channel->connections[rail];
    if (!connection) continue;
    if (!(links >> rail & 1)) {
      channel_drop(connection, "the interface has no link", true);
    } else if (connection_is_stalled(connection, now)) {
      channel_drop(connection, "the peer acknowledged nothing for the limit of a stall", true);
    }
  }
  *is_busy |= channel->num_active || channel->first_receive < channel->taken_receives || channel->num_connections < channel->num_rails;
  if (channel->dials && !channel->peer_said_bye && !channel->error) joining_dial(channel, now, links);
  if (channel->num_connections || channel->error) return;
  if (!channel->was_connected) {
    if (channel->dials && now - channel->created_ns > (int64_t)(1e9 * the_host->timeout_s)) channel_fail(channel, REMOTE_ERROR, "no rail could be connected");
    return;
  }
  if (!channel->without_rail_ns) channel->without_rail_ns = now;
  if (now - channel->without_rail_ns > (int64_t)(1e9 * the_host->limits.no_rail_s)) channel_fail(channel, REMOTE_ERROR, "no rail is left");
}

/* End a connection of a channel that closes, once the peer has read everything: what arrives here meanwhile is discarded,
 * since to close with unread bytes would reset the connection, and lose what the peer has not read. */
static void end_when_written(struct connection *connection, int64_t now) {
  bool has_output = connection_has_output(connection);
  if (!has_output && !connection->drains_until_ns) {
    connection->drains_until_ns = now + DRAINING_NS;
    shutdown(connection->watched.fd, SHUT_WR);
  }
  if (now - connection->channel->closing_ns > CLOSING_NS || (!has_output && now > connection->drains_until_ns)) channel_end(connection, has_output);
}

void channel_step(struct channel *channel, int64_t now, int64_t *wait_ns) {
  if (channel->closing_ns) {
    for (int rail = 0; rail < channel->num_rails; rail++) {
      if (channel->connections[rail]) end_when_written(channel->connections[rail], now);
    }
    if (*wait_ns > RETRY_NS) *wait_ns = channel->num_connections ? RETRY_NS : 0;
    return;
  }
  if (rescue(channel, now) && *wait_ns > RESCUE_NS) *wait_ns = RESCUE_NS;
  if (channel->num_connections && has_chunk(channel)) {
    channel_pump(channel);
    if (*wait_ns > RETRY_NS && has_chunk(channel)) *wait_ns = RETRY_NS;
  }
}

/* ---- from NCCL's threads ---- */

struct channel *channel_new(struct loop *loop) {
  struct channel *channel = calloc(1, sizeof *channel);
  if (!channel) abort();
  channel->loop = loop;
  random_bytes(&channel->id, sizeof channel->id);
  channel->created_ns = now_ns();
  channel->peer_idle = (1u << MAX_RAILS) - 1;
  return channel;
}

void channel_free(struct channel *channel) {
  while (channel->arrivals) {
    struct arrival *arrival = channel->arrivals;
    channel->arrivals = arrival->next;
    close(arrival->fd);
    free(arrival);
  }
  for (int i = 0; i < MAX_REQUESTS; i++) {
    free(channel->out[i].acked);
    free(channel->in[i].arrived);
  }
  free(channel->again);
  free(channel);
}

struct request *channel_post(struct channel *channel, bool is_receive, void *data, size_t size) {
  _Atomic uint64_t *num = is_receive ? &channel->num_receives : &channel->num_sends;
  struct request *request = (is_receive ? channel->receives : channel->sends) + *num % MAX_REQUESTS;
  if (atomic_load(&request->state) != IS_FREE) return NULL; /* as many as NCCL may have */
  if (!is_receive) board_announce(&the_host->board, the_host->direct);
  request->channel = channel;
  request->is_receive = is_receive;
  request->data = data;
  request->size = size;
  atomic_store(&request->state, IS_PENDING);
  atomic_fetch_add(num, 1);
  loop_kick(channel, false);
  return request;
}

void channel_close(struct channel *channel) {
  pthread_mutex_lock(&the_host->lock); /* so that peers connect it no more */
  for (struct channel **at = &the_host->named; *at; at = &(*at)->next_named) {
    if (*at == channel) {
      *at = channel->next_named;
      break;
    }
  }
  pthread_mutex_unlock(&the_host->lock);
  loop_kick(channel, true);
  for (int64_t end = now_ns() + CLOSE_LIMIT_S * 1000000000ll; !channel->is_closed; usleep(50)) {
    if (now_ns() > end) {
      say(true, "a channel could not be closed within %d s; its memory is kept", CLOSE_LIMIT_S);
      return;
    }
  }
  channel_free(channel);
}

/* ---- in the loop's thread, after something was posted ---- */

/* Fail what is not done, tell the peer, and end once that is written. */
static void begin_close(struct channel *channel, int64_t now) {
  const struct record bye = {.kind = BYE};
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_release_memory(channel->connections[rail]);
  }
  joining_give_up(channel);
  fail_requests(channel, channel->error ? channel->error : INTERNAL_ERROR);
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_credit(channel->connections[rail], &bye);
  }
  channel_pump(channel);
  channel->closing_ns = now;
}

void channel_ready(struct channel *channel, bool closes) {
  pthread_mutex_lock(&the_host->lock);
  struct arrival *arrivals = channel->arrivals;
  channel->arrivals = NULL;
  pthread_mutex_unlock(&the_host->lock);
  while (arrivals) {
    struct arrival *arrival = arrivals;
    arrivals = arrival->next;
    channel_attach(channel, arrival->fd, arrival->rail, arrival->incarnation);
    free(arrival);
  }
  if (channel->closing_ns) return;
  take_sends(channel);
  take_receives(channel);
  if (closes) {
    begin_close(channel, now_ns());
  } else if (!channel->error) {
    channel_pump(channel);
  }
}

bool channel_has_ended(const struct channel *channel) { return channel->closing_ns && !channel->num_connections; }

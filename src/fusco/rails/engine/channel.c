/* A channel: messages between two workers over all rails of their hosts. Its connections fail, and are replaced. */
#include "engine.h"

#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

static const int64_t CLOSING_NS = 3000000000, DRAINING_NS = 200000000, CLOSING_PAUSE_NS = 100000;
enum { READ_BUDGET = 4 << 20 /* bytes read before other connections get their turn */ };

/* ---- what fails, in words ---- */

void channel_note_failure(struct channel *channel, int rail, const char *reason) { snprintf(channel->failures[rail], TEXT_BYTES, "%s", reason); }

/* " to ADDRESS:PORT" of the other end of a rail, if this end dialled it. */
static const char *describe_peer(const struct channel *channel, int rail, char text[TEXT_BYTES]) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  socklen_t num_bytes = channel->peer_address_bytes[rail];
  const struct sockaddr *address = (const struct sockaddr *)(channel->peer_address + rail);
  if (!num_bytes || getnameinfo(address, num_bytes, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV)) return "";
  snprintf(text, TEXT_BYTES, strchr(host, ':') ? " to [%s]:%s" : " to %s:%s", host, port);
  return text;
}

static void end_connection(struct connection *connection, bool aborts) {
  struct channel *channel = connection->channel;
  channel->connections[connection->rail] = NULL;
  channel->num_connections--;
  channel->num_owed -= connection->num_credits - connection->credits_sent;
  atomic_fetch_and(&channel->usable, ~(1u << connection->rail));
  channel->scheduler.view.usable = channel->usable;
  for (int i = 0; i < connection->num_outstanding; i++) {
    if (!connection->outstanding[i].has_passed) scheduler_completed(&channel->scheduler, connection->rail, 0);
  }
  connection->num_outstanding = 0;
  connection->is_closed = true;
  loop_forget(channel->loop, &connection->watched, aborts);
}

static void end_all(struct channel *channel) {
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) end_connection(channel->connections[rail], true);
  }
}

static void stop_dialling(struct channel *channel) {
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct watched *joining = channel->attempts[rail].joining;
    if (joining) loop_forget(channel->loop, joining, false);
    channel->attempts[rail].joining = NULL;
  }
}

/* Break the channel: all requests fail, all connections end. The reason names each rail: connected, or why it failed. */
static void fail(struct channel *channel, int result, bool names_rails, const char *format, ...) {
  const struct host *host = channel->host;
  if (channel->error || channel->closing_ns) return;
  char *text = channel->reason;
  size_t room = sizeof channel->reason, used;
  va_list arguments;
  va_start(arguments, format);
  used = (size_t)vsnprintf(text, room, format, arguments);
  va_end(arguments);
  for (int rail = 0; names_rails && rail < channel->num_rails && used < room; rail++) {
    const struct rail *each = host->rails + rail;
    const char *state = channel->connections[rail] ? "connected" : *channel->failures[rail] ? channel->failures[rail] : "never connected";
    char peer[TEXT_BYTES];
    const char *to = describe_peer(channel, rail, peer);
    used += (size_t)snprintf(text + used, room - used, "%srail %d (%s, %s%s): %s", rail ? "; " : "", rail, each->named.interface, each->text, to, state);
  }
  channel->num_seen = channel->num_connections;
  channel->is_told = !messages_are_done(channel) || !channel->was_connected; /* else it has lost nothing yet, such as at the end of a job */
  say(host, channel->is_told, "worker %d: %s", host->worker, text);
  end_all(channel);
  stop_dialling(channel);
  messages_fail(channel, result);
  atomic_store(&channel->is_closed, true);
  host_changed(channel->host);
}

void channel_unreachable(struct channel *channel, const char *reason) {
  fail(channel, PEER_LOST, true, "worker %d is unreachable, %s: ", channel->peer, reason);
}

static void drop(struct connection *connection, const char *reason, bool tells_peer);

/* ---- chunks ---- */

bool channel_waits(const struct channel *channel) { return channel->num_connections && messages_has_chunk(channel); }

/* Take chunks that have left the network from the counts of their rails. */
static void count_passed(struct channel *channel) {
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_count_passed(channel->connections[rail]);
  }
}

/* If a write fails, take what came before: acknowledgements, and word that the peer has left. NULL, or why it failed. */
static const char *write_or_read_rest(struct connection *connection) {
  const char *why = connection_write(connection);
  if (why) connection_read(connection, SSIZE_MAX);
  return why;
}

static void write_all(struct channel *channel) {
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *connection = channel->connections[rail];
    if (!connection || connection->wants_write || !connection_has_output(connection)) continue;
    const char *why = write_or_read_rest(connection);
    if (why) {
      drop(connection, why, true);
    } else if (connection->wants_write) {
      loop_watch(channel->loop, &connection->watched, EPOLLIN | EPOLLOUT);
    }
  }
}

/* Give chunks to rails as long as the scheduler finds one, and write what there is. */
static void pump(struct channel *channel) {
  struct scheduler *scheduler = &channel->scheduler;
  scheduler->view.usable = channel->usable;
  if (channel_waits(channel)) count_passed(channel);
  while (channel_waits(channel)) {
    uint64_t seq;
    uint32_t chunk;
    int rail = scheduler_next(scheduler);
    if (rail == WAIT) break;
    if (!messages_pop(channel, &seq, &chunk)) {
      scheduler_completed(scheduler, rail, 0);
      break;
    }
    struct connection *connection = channel->connections[rail];
    struct posted *posted = connection_find(connection, seq, chunk);
    if (posted) { /* it is late, but no other rail has room for a copy */
      scheduler_completed(scheduler, rail, 0);
      posted->at_ns = now_ns();
      posted->is_late = false;
      continue;
    }
    if (connection->num_outstanding == MAX_OUTSTANDING) { /* the peer does not read; its credits come later */
      messages_put_back(channel, seq, chunk);
      scheduler_completed(scheduler, rail, 0);
      break;
    }
    const char *payload;
    uint32_t num_bytes = messages_payload(channel, messages_outgoing(channel, seq, chunk), chunk, &payload);
    connection->outstanding[connection->num_outstanding++] =
        (struct posted){.seq = seq, .chunk = chunk, .num_bytes = num_bytes, .at_ns = now_ns(), .is_queued = true};
  }
  write_all(channel);
}

/* Take chunks back from borrowed rails whose owners have begun to send, and send those again that are late there. */
static void rescue(struct channel *channel, int64_t now) {
  uint32_t busy = 0;
  bool borrows = false;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *connection = channel->connections[rail];
    if (!connection || !connection->num_outstanding || !host_defers(channel->host, rail)) continue;
    if (!borrows) busy = scheduler_busy(&channel->scheduler);
    borrows = true;
    connection_count_passed(connection);
    connection_put_back(connection, now, busy >> rail & 1);
  }
}

/* ---- records ---- */

static struct record credit(struct channel *channel, uint16_t kind, uint64_t seq, uint64_t size, uint32_t slot) {
  struct record record = {.seq = seq, .size = size, .slot = slot, .kind = kind};
  scheduler_stamp(&channel->scheduler, &record.mask, &record.epoch);
  return record;
}

static void grant(struct channel *channel, uint64_t seq) {
  struct record record = credit(channel, GRANT, seq, messages_incoming(channel, seq)->size, 0);
  struct connection *best = NULL;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *each = channel->connections[rail];
    if (each && (!best || (connection_has_output(best) && !connection_has_output(each)))) best = each;
  }
  if (best) connection_credit(best, &record);
}

/* Grant what was not granted yet; a sender has no room for more than so many buffers ahead of its messages. */
static void grant_more(struct channel *channel) {
  while (!channel->error && channel->next_grant < channel->receives.end && channel->next_grant < channel->receives.first + MAX_GRANTS) grant(channel, channel->next_grant++);
}

/* Earlier grants may have been lost; repeated ones have no effect. */
static void grant_again(struct channel *channel) {
  for (uint64_t seq = channel->receives.first; seq < channel->next_grant; seq++) {
    if (!messages_incoming(channel, seq)->chunks) grant(channel, seq);
  }
}

static const char *take_ack(struct connection *connection, const struct record *record) {
  struct channel *channel = connection->channel;
  scheduler_credit(&channel->scheduler, record->mask, record->epoch);
  struct posted *posted = connection_find(connection, record->seq, record->slot);
  if (!posted || posted->is_queued) {
    return problem_of(channel, "chunk %u of message %llu was acknowledged, but not sent", record->slot, (unsigned long long)record->seq);
  }
  if (!posted->has_passed) connection_note_passed(connection, posted);
  connection_remove(connection, posted);
  return messages_acked(channel, record->seq, record->slot);
}

static const char *take_record(struct connection *connection, const struct record *record, bool was_wanted) {
  struct channel *channel = connection->channel;
  if (record->kind == DATA || record->kind == TOO_LARGE) {
    if (channel->closing_ns) return NULL;
    struct record ack = credit(channel, ACK, record->seq, record->size, record->slot);
    connection_credit(connection, &ack);
    if (was_wanted) {
      board_received(&channel->host->sharing.board, connection->rail, record->mask);
      messages_arrived(channel, record);
      grant_more(channel);
    }
    return NULL;
  }
  if (record->kind == ACK) return take_ack(connection, record);
  if (record->kind == GRANT) {
    scheduler_credit(&channel->scheduler, record->mask, record->epoch);
    return messages_granted(channel, record->seq, record->size);
  }
  if (record->kind == RAIL_DOWN) {
    struct connection *failed = record->slot < MAX_RAILS ? channel->connections[record->slot] : NULL;
    if (failed && failed != connection && failed->incarnation == record->epoch) drop(failed, "the peer says that it has failed", false);
    return NULL;
  }
  channel->peer_said_bye = true;
  return "the peer has closed the channel";
}

static void on_connection(struct watched *watched, uint32_t events) {
  struct connection *connection = (struct connection *)watched;
  struct channel *channel = connection->channel;
  const char *why = NULL;
  if (events & EPOLLOUT) {
    why = write_or_read_rest(connection);
    if (!why && !connection->wants_write) loop_watch(channel->loop, watched, EPOLLIN);
  }
  if (!why && events & ~(uint32_t)EPOLLOUT) why = connection_read(connection, READ_BUDGET);
  if (why) drop(connection, why, true);
  if (channel->closing_ns || channel->error) return;
  if (channel->host->is_nccl) { /* has many channels: chunks follow in turn */
    write_all(channel);
  } else {
    pump(channel);
  }
}

/* ---- connections ---- */

void channel_attach(struct channel *channel, int fd, int rail, uint32_t incarnation) {
  if (channel->connections[rail]) drop(channel->connections[rail], "the peer has connected again", true);
  if (channel->error || channel->closing_ns) {
    const struct record bye = {.kind = BYE, .magic = RECORD_MAGIC};
    send(fd, &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT); /* the buffer of a new socket holds it */
    close(fd);
    return;
  }
  struct connection *connection = connection_new(channel, fd, rail, incarnation, on_connection, take_record);
  connection->progress_ns = channel->loop->clock_ns;
  channel->connections[rail] = connection;
  channel->num_connections++;
  channel->without_rail_ns = 0;
  channel->was_connected = true;
  channel->peer_has_ended = false;
  if (!channel->first_connected_ns) channel->first_connected_ns = now_ns();
  atomic_fetch_or(&channel->usable, 1u << rail);
  host_changed(channel->host);
  const char *why = loop_add(channel->loop, &connection->watched, EPOLLIN);
  if (why) {
    drop(connection, why, true);
    return;
  }
  if (channel->num_connections == 1) grant_again(channel);
  pump(channel);
}

/* Give a connection up: what it had is sent over the other rails. */
static void drop(struct connection *connection, const char *reason, bool tells_peer) {
  struct channel *channel = connection->channel;
  if (connection->is_closed) return;
  struct record down = {.slot = (uint32_t)connection->rail, .epoch = connection->incarnation, .kind = RAIL_DOWN};
  channel_note_failure(channel, connection->rail, reason);
  for (int i = 0; i < connection->num_outstanding; i++) {
    messages_put_back(channel, connection->outstanding[i].seq, connection->outstanding[i].chunk);
  }
  end_connection(connection, true);
  if (channel->closing_ns) return;
  if (channel->peer_said_bye && !channel->num_connections) {
    fail(channel, PEER_LEFT, false, "worker %d has closed its channel", channel->peer);
    return;
  }
  channel->peer_has_ended |= reason == PEER_CLOSED;
  if (channel->peer_has_ended && !channel->num_connections) {
    channel_unreachable(channel, "its process has ended");
    return;
  }
  for (int rail = 0; tells_peer && rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_credit(channel->connections[rail], &down);
  }
  grant_again(channel);
  pump(channel);
}

/* ---- for the loop ---- */

bool channel_check(struct channel *channel, int64_t now, uint32_t links, bool *is_busy) {
  if (channel->closing_ns || channel->error) return false;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct connection *connection = channel->connections[rail];
    if (!connection) continue;
    if (!(links >> rail & 1)) {
      drop(connection, "the interface has no link", true);
    } else if (connection_owes_too_much(connection)) {
      drop(connection, NOT_READ, true);
    } else if (connection_is_stalled(connection, now)) {
      drop(connection, problem_of(channel, "the peer acknowledged nothing for %g s", channel->host->sharing.limits.stall_s), true);
    }
  }
  *is_busy |= !messages_are_done(channel) || channel->num_connections < channel->num_rails;
  return channel->dials && !channel->peer_said_bye && !channel->error;
}

void channel_check_rails(struct channel *channel, int64_t now) {
  const struct host *host = channel->host;
  if (channel->closing_ns || channel->num_connections || channel->error) return;
  if (!channel->was_connected) {
    if (host->is_nccl && channel->dials && now_ns() - channel->created_ns > (int64_t)(1e9 * host->timeout_s)) {
      fail(channel, PEER_LOST, true, "no rail to worker %d was connected within %g s: ", channel->peer, host->timeout_s);
    }
    return;
  }
  if (!channel->without_rail_ns) channel->without_rail_ns = now;
  if (now - channel->without_rail_ns > (int64_t)(1e9 * host->sharing.limits.no_rail_s)) channel_unreachable(channel, "no rail is left");
}

/* End a connection of a channel that closes, once the peer has read everything: what arrives here meanwhile is discarded,
 * since to close with unread bytes would reset the connection, and lose what the peer has not read. */
static void end_when_written(struct connection *connection, int64_t now) {
  bool has_output = connection_has_output(connection);
  if (!has_output && !connection->drains_until_ns) {
    connection->drains_until_ns = now + DRAINING_NS;
    shutdown(connection->watched.fd, SHUT_WR);
  }
  if (now - connection->channel->closing_ns > CLOSING_NS || (!has_output && now > connection->drains_until_ns)) end_connection(connection, has_output);
}

void channel_step(struct channel *channel, int64_t now, bool rescues, int64_t *wait_ns) {
  if (channel->closing_ns) {
    for (int rail = 0; rail < channel->num_rails; rail++) {
      if (channel->connections[rail]) end_when_written(channel->connections[rail], now);
    }
    if (*wait_ns > CLOSING_PAUSE_NS) *wait_ns = channel->num_connections ? CLOSING_PAUSE_NS : 0;
    return;
  }
  if (channel->sends.first < channel->sends.end && channel->num_connections && channel->host->sharing.policy.defers) {
    int64_t next_ns = channel->loop->next_rescue_ns - now;
    if (rescues) rescue(channel, now);
    if (*wait_ns > next_ns) *wait_ns = next_ns;
  }
  if (channel_waits(channel)) {
    pump(channel);
    if (*wait_ns > channel->host->retry_ns && channel_waits(channel)) *wait_ns = channel->host->retry_ns;
  }
}

static void fail_as_closed(struct channel *channel) {
  stop_dialling(channel);
  if (!channel->error) snprintf(channel->reason, sizeof channel->reason, "the channel was closed");
  messages_fail(channel, channel->error ? channel->error : CHANNEL_CLOSED);
}

void channel_abandon(struct channel *channel) {
  end_all(channel);
  fail_as_closed(channel);
  channel->closing_ns = 1;
}

/* Fail what is not done, tell the peer, and end once that is written. */
static void begin_close(struct channel *channel, int64_t now) {
  const struct record bye = {.kind = BYE};
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_release_memory(channel->connections[rail]);
  }
  fail_as_closed(channel);
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->connections[rail]) connection_credit(channel->connections[rail], &bye);
  }
  channel->closing_ns = now;
  write_all(channel);
}

void channel_ready(struct channel *channel) {
  pthread_mutex_lock(&channel->host->lock);
  struct arrival *arrivals = channel->arrivals;
  channel->arrivals = NULL;
  pthread_mutex_unlock(&channel->host->lock);
  pthread_mutex_lock(&channel->loop->lock);
  bool closes = channel->closes;
  char *gives_up = channel->gives_up;
  channel->gives_up = NULL;
  pthread_mutex_unlock(&channel->loop->lock);
  while (arrivals) {
    struct arrival *arrival = arrivals;
    arrivals = arrival->next;
    channel_attach(channel, arrival->fd, arrival->rail, arrival->incarnation);
    free(arrival);
  }
  if (gives_up) fail(channel, PEER_LOST, true, "%s", gives_up);
  free(gives_up);
  messages_take_posted(channel);
  grant_more(channel);
  if (closes && !channel->closing_ns) {
    begin_close(channel, now_ns());
  } else if (!channel->error) {
    pump(channel);
  }
}

bool channel_has_ended(const struct channel *channel) { return channel->closing_ns && !channel->num_connections; }

/* ---- for callers ---- */

struct channel *channel_new(struct host *host, int peer, int num_rails, uint32_t peer_chunk_bytes, const uint8_t *name, const uint8_t *secret) {
  struct channel *channel = calloc(1, sizeof *channel);
  if (!channel) abort();
  channel->host = host;
  channel->peer = peer;
  channel->num_rails = num_rails < host->sharing.num_rails ? num_rails : host->sharing.num_rails;
  channel->peer_chunk_bytes = peer_chunk_bytes;
  memcpy(channel->name, name, NAME_BYTES);
  memcpy(channel->secret, secret, SECRET_BYTES);
  random_bytes(&channel->id, sizeof channel->id);
  channel->created_ns = now_ns();
  scheduler_init(&channel->scheduler, &host->sharing);
  channel->loop = host->loops + __atomic_fetch_add(&host->next_loop, 1, __ATOMIC_RELAXED) % (unsigned)host->num_loops;
  return channel;
}

void channel_dial(struct channel *channel) {
  channel->dials = true;
  pthread_mutex_lock(&channel->host->lock);
  channel->next_named = channel->host->named;
  channel->host->named = channel;
  pthread_mutex_unlock(&channel->host->lock);
  loop_kick(channel, false, false);
}

void channel_free(struct channel *channel) {
  while (channel->arrivals) {
    struct arrival *arrival = channel->arrivals;
    channel->arrivals = arrival->next;
    close(arrival->fd);
    free(arrival);
  }
  free(channel->sends.items);
  free(channel->receives.items);
  free(channel->again.items);
  free(channel->gives_up);
  free(channel);
}

void channel_close(struct channel *channel, bool is_released) {
  struct host *host = channel->host;
  bool is_ended = !host; /* it has been closed, and only the memory is left */
  if (host) {
    pthread_mutex_lock(&host->lock); /* so that peers connect it no more */
    for (struct channel **at = &host->named; *at; at = &(*at)->next_named) {
      if (*at == channel) {
        *at = channel->next_named;
        break;
      }
    }
    pthread_mutex_unlock(&host->lock);
    is_ended = !loop_kick(channel, true, is_released);
  }
  if (is_ended && is_released) channel_free(channel);
}

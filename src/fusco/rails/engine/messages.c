/* Messages of a channel, as chunks: sends may begin once the peer has granted a buffer; receives finish in order. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

const char *problem_of(struct channel *channel, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(channel->problem, sizeof channel->problem, format, arguments);
  va_end(arguments);
  return channel->problem;
}

static uint64_t count_chunks(uint64_t num_bytes, uint32_t chunk_bytes) {
  return num_bytes ? (num_bytes - 1) / chunk_bytes + 1 : 1; /* an empty message arrives, too */
}

static void begin(struct request *request, uint32_t num_chunks) {
  request->num_chunks = request->num_left = num_chunks;
  request->chunks = calloc(num_chunks, 1);
  if (!request->chunks) abort();
}

static void finish(struct channel *channel, struct request *request, int result, uint64_t num_bytes) {
  bool notifies = request->notifies;
  free(request->chunks);
  request->chunks = NULL;
  request->result = result;
  request->num_bytes = num_bytes;
  request->finished_ns = now_ns();
  channel->host->progress.num_done++;
  if (atomic_exchange(&request->state, IS_DONE) == IS_WAITED_FOR) { /* the memory may be gone, its address is enough */
    syscall(SYS_futex, &request->state, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
  }
  if (notifies) host_changed(channel->host);
}

bool request_wait(struct request *request, int64_t limit_ns) {
  struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
  uint32_t pending = IS_PENDING;
  if (atomic_compare_exchange_strong(&request->state, &pending, IS_WAITED_FOR) || pending == IS_WAITED_FOR) {
    syscall(SYS_futex, &request->state, FUTEX_WAIT_PRIVATE, IS_WAITED_FOR, &limit, NULL, 0);
  }
  return request->state == IS_DONE;
}

/* ---- queues ---- */

static void append(struct queue *queue, struct request *request) {
  if (queue->end - queue->first == queue->room) {
    size_t room = queue->room ? 2 * queue->room : 8;
    struct request **items = calloc(room, sizeof *items);
    if (!items) abort();
    for (uint64_t seq = queue->first; seq < queue->end; seq++) items[seq % room] = queue->items[seq % queue->room];
    free(queue->items);
    queue->items = items;
    queue->room = room;
  }
  queue->items[queue->end++ % queue->room] = request;
}

static struct request *find(const struct queue *queue, uint64_t seq) {
  return seq >= queue->first && seq < queue->end ? queue->items[seq % queue->room] : NULL;
}

static void take_out(struct queue *queue, uint64_t seq) {
  queue->items[seq % queue->room] = NULL;
  while (queue->first < queue->end && !queue->items[queue->first % queue->room]) queue->first++;
}

bool messages_are_done(const struct channel *channel) {
  return channel->sends.first == channel->sends.end && channel->receives.first == channel->receives.end;
}

int messages_post(struct channel *channel, struct request *request) {
  struct host *host = channel->host;
  int error = channel->error;
  if (error) return error;
  if (host->pid != getpid()) return WAS_FORKED;
  if (!request->is_receive) board_announce(&host->sharing.board, host->sharing.direct, now_ns());
  request->next = NULL;
  request->chunks = NULL;
  request->is_too_large = 0;
  request->state = IS_PENDING;
  pthread_mutex_lock(&channel->loop->lock);
  error = channel->is_ended || channel->closes ? CHANNEL_CLOSED : 0;
  if (!error) {
    int way = (int)request->is_receive;
    request->seq = channel->num_posted[way]++;
    if (!channel->posted[way]) channel->last_posted[way] = &channel->posted[way];
    *channel->last_posted[way] = request;
    channel->last_posted[way] = &request->next;
  }
  pthread_mutex_unlock(&channel->loop->lock);
  if (!error) loop_kick(channel, false, false);
  return error;
}

/* ---- messages to send ---- */

static void take_grant(struct channel *channel, struct request *message, uint64_t size) {
  message->is_too_large = size < message->size;
  begin(message, message->is_too_large ? 1 : (uint32_t)count_chunks(message->size, (uint32_t)channel->host->sharing.limits.chunk_bytes));
}

const char *messages_granted(struct channel *channel, uint64_t seq, uint64_t size) {
  struct request *message = find(&channel->sends, seq);
  if (seq >= channel->sends.end + MAX_GRANTS) return "more buffers granted than a channel has";
  if (seq >= channel->sends.end) {
    channel->granted[seq % MAX_GRANTS] = size + 1;
  } else if (message && !message->chunks) {
    take_grant(channel, message, size);
  }
  return NULL;
}

static void take_send(struct channel *channel, struct request *request) {
  uint64_t *early = channel->granted + channel->sends.end % MAX_GRANTS;
  append(&channel->sends, request);
  if (*early) take_grant(channel, request, *early - 1);
  *early = 0;
}

struct request *messages_outgoing(const struct channel *channel, uint64_t seq, uint32_t chunk) {
  struct request *message = find(&channel->sends, seq);
  return message && message->chunks && !message->chunks[chunk] ? message : NULL;
}

uint32_t messages_payload(const struct channel *channel, const struct request *message, uint32_t chunk, const char **payload) {
  uint64_t chunk_bytes = (uint64_t)channel->host->sharing.limits.chunk_bytes, start = chunk * chunk_bytes;
  *payload = "";
  if (message->is_too_large || !message->size) return 0;
  *payload = message->data + start;
  return (uint32_t)(message->size - start < chunk_bytes ? message->size - start : chunk_bytes);
}

const char *messages_acked(struct channel *channel, uint64_t seq, uint32_t chunk) {
  struct request *message = find(&channel->sends, seq);
  if (!message || !message->chunks) return NULL; /* acknowledged over another rail */
  if (chunk >= message->num_chunks) return problem_of(channel, "chunk %u of message %llu was acknowledged, which has %u", chunk, (unsigned long long)seq, message->num_chunks);
  message->num_left -= !message->chunks[chunk];
  message->chunks[chunk] = 1;
  if (message->num_left) return NULL;
  take_out(&channel->sends, seq);
  if (message->is_too_large) say(channel->host, true, "a message of %zu bytes is larger than the buffer of the peer's receive", (size_t)message->size);
  finish(channel, message, message->is_too_large ? MESSAGE_TOO_LARGE : SUCCESS, message->size);
  return NULL;
}

void messages_put_back(struct channel *channel, uint64_t seq, uint32_t chunk) {
  struct again *again = &channel->again;
  if (again->begin == again->end) again->begin = again->end = 0;
  if (again->end == again->room) {
    again->room = 2 * again->room + 16;
    again->items = realloc(again->items, again->room * sizeof *again->items);
    if (!again->items) abort();
  }
  again->items[again->end].seq = seq;
  again->items[again->end++].chunk = chunk;
}

bool messages_has_chunk(const struct channel *channel) {
  if (channel->error || channel->closing_ns) return false;
  const struct request *next = find(&channel->sends, channel->next_seq);
  return channel->again.begin < channel->again.end || (next && next->chunks);
}

/* The next chunk to send; chunks that were lost come first. False if what was left has been acknowledged meanwhile. */
bool messages_pop(struct channel *channel, uint64_t *seq, uint32_t *chunk) {
  struct again *again = &channel->again;
  while (again->begin < again->end) {
    *seq = again->items[again->begin].seq;
    *chunk = again->items[again->begin++].chunk;
    if (messages_outgoing(channel, *seq, *chunk)) return true;
  }
  if (!messages_has_chunk(channel)) return false;
  *seq = channel->next_seq;
  *chunk = channel->next_chunk++;
  if (channel->next_chunk == find(&channel->sends, *seq)->num_chunks) {
    channel->next_seq++;
    channel->next_chunk = 0;
  }
  return true;
}

/* ---- receives ---- */

struct request *messages_incoming(const struct channel *channel, uint64_t seq) { return find(&channel->receives, seq); }

void messages_take_posted(struct channel *channel) {
  struct request *posted[2];
  pthread_mutex_lock(&channel->loop->lock);
  memcpy(posted, channel->posted, sizeof posted);
  channel->posted[0] = channel->posted[1] = NULL;
  pthread_mutex_unlock(&channel->loop->lock);
  for (int way = 0; way < 2; way++) {
    for (struct request *request = posted[way], *next; request; request = next) {
      next = request->next;
      if (channel->error) {
        finish(channel, request, channel->error, 0);
      } else if (way) {
        append(&channel->receives, request);
      } else {
        take_send(channel, request);
      }
    }
  }
}

/* Take the size of a message from its first chunk; NULL, or what is wrong. */
static const char *begin_receive(struct channel *channel, struct request *incoming, const struct record *record) {
  bool fits = record->size <= incoming->size;
  uint64_t num_chunks = fits ? count_chunks(record->size, channel->peer_chunk_bytes) : 1;
  if (fits != (record->kind == DATA)) {
    return problem_of(channel, "message %llu of %llu bytes is said %s into a buffer of %llu", (unsigned long long)record->seq, (unsigned long long)record->size,
                         fits ? "not to fit" : "to fit", (unsigned long long)incoming->size);
  }
  if (num_chunks > UINT32_MAX) return "a message of more chunks than can be numbered";
  incoming->num_bytes = record->size;
  incoming->is_too_large = !fits;
  begin(incoming, (uint32_t)num_chunks);
  channel->num_begun++;
  return NULL;
}

/* The memory for a payload. Asked again before each part of it is read: as soon as another rail has brought the chunk, it is
 * not wanted, and the memory may belong to the caller again. */
char *messages_target(struct channel *channel, const struct record *record, bool *is_wanted, const char **why) {
  *is_wanted = false;
  if (record->seq < channel->receives.first || channel->closing_ns) return NULL;
  if (record->seq >= channel->next_grant) {
    *why = problem_of(channel, "a chunk of message %llu has come, but only %llu were granted", (unsigned long long)record->seq, (unsigned long long)channel->next_grant);
    return NULL;
  }
  struct request *incoming = find(&channel->receives, record->seq);
  if (!incoming->chunks && (*why = begin_receive(channel, incoming, record))) return NULL;
  uint64_t start = (uint64_t)record->slot * channel->peer_chunk_bytes, expected = 0;
  if (record->size != incoming->num_bytes || record->slot >= incoming->num_chunks) {
    *why = problem_of(channel, "chunk %u of a message of %llu bytes, which has %llu", record->slot, (unsigned long long)record->size, (unsigned long long)incoming->num_bytes);
    return NULL;
  }
  if (incoming->chunks[record->slot]) return NULL;
  if (!incoming->is_too_large) expected = record->size - start < channel->peer_chunk_bytes ? record->size - start : channel->peer_chunk_bytes;
  if (record->mask != expected || (record->kind == DATA) == (bool)incoming->is_too_large) {
    *why = problem_of(channel, "chunk %u of message %llu claims %u bytes instead of %llu", record->slot, (unsigned long long)record->seq, record->mask, (unsigned long long)expected);
    return NULL;
  }
  *is_wanted = true;
  return incoming->data + (expected ? start : 0);
}

void messages_arrived(struct channel *channel, const struct record *record) {
  struct queue *queue = &channel->receives;
  struct request *incoming = find(queue, record->seq), *first;
  if (!incoming || incoming->chunks[record->slot]) return;
  incoming->chunks[record->slot] = 1;
  incoming->num_left--;
  while ((first = find(queue, queue->first)) && first->chunks && !first->num_left) { /* requests finish in order */
    if (first->is_too_large) say(channel->host, true, "a receive has a buffer of %zu bytes, its message has %zu", (size_t)first->size, (size_t)first->num_bytes);
    take_out(queue, queue->first);
    channel->num_begun--;
    finish(channel, first, first->is_too_large ? MESSAGE_TOO_LARGE : SUCCESS, first->num_bytes);
  }
}

void messages_fail(struct channel *channel, int result) {
  atomic_store(&channel->error, result);
  struct queue *queues[2] = {&channel->sends, &channel->receives};
  for (int way = 0; way < 2; way++) {
    for (; queues[way]->first < queues[way]->end; queues[way]->first++) {
      struct request *request = find(queues[way], queues[way]->first);
      if (request) finish(channel, request, result, 0);
    }
  }
  channel->num_begun = 0;
  channel->again.begin = channel->again.end = 0;
  messages_take_posted(channel);
}

/* A connection of a channel over one rail: credits and chunks out, records and payloads in. It never blocks. */
#include "engine.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
  /* Of the socket's buffer. Credits wait behind it, so it is short; but it feeds the rail while the core is busy. */
  MAX_UNSENT = 256 * 1024,
  LATE = 4, /* times what is typical */
  LATE_AVERAGED_OVER = 8,
  MAX_UNSENT_CREDITS = 2 << 20, /* bytes; a peer that reads leaves some hundred */
  LOW_TOS = 0x20, LOW_PRIORITY = 2,  /* RFC 3662: class CS1 in packets, the lowest band of queueing disciplines */
};
const char NOT_READ[] = "the peer takes part, but does not read", PEER_CLOSED[] = "the peer's process has closed it";
static const char ZEROS[64 * 1024]; /* sent for the rest of a chunk that the peer has got over another rail */

static void release(struct watched *watched) {
  struct connection *connection = (struct connection *)watched;
  free(connection->credits);
  free(connection->kept);
  free(connection);
}

struct connection *connection_new(struct channel *channel, int fd, int rail, uint32_t incarnation, event_handler *on_event, record_handler *take) {
  struct connection *connection = calloc(1, sizeof *connection);
  if (!connection) abort();
  connection->watched = (struct watched){on_event, release, fd, NULL};
  connection->channel = channel;
  connection->take = take;
  connection->rail = rail;
  connection->incarnation = incarnation;
  connection->progress_ns = now_ns();
  return connection;
}

bool configure_socket(int fd, int family, bool defers) {
  int one = 1, unsent = MAX_UNSENT, tos = LOW_TOS, priority = LOW_PRIORITY;
  bool works = !setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  works &= !setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  if (defers) { /* the class before the priority, which it changes, too */
    works &= !(family == AF_INET6 ? setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &tos, sizeof tos)
                                  : setsockopt(fd, IPPROTO_IP, IP_TOS, &tos, sizeof tos));
    works &= !setsockopt(fd, SOL_SOCKET, SO_PRIORITY, &priority, sizeof priority);
  }
  return works;
}

bool connection_owes_too_much(const struct connection *connection) {
  return connection->num_credits - connection->credits_sent >= MAX_UNSENT_CREDITS;
}

/* One that owes too much is given up at the next look, so the record needs no room. */
void connection_credit(struct connection *connection, const struct record *record) {
  if (connection_owes_too_much(connection)) return;
  if (connection->num_credits + sizeof *record > connection->credit_room) {
    connection->credit_room = 2 * connection->credit_room + 64 * sizeof *record;
    connection->credits = realloc(connection->credits, connection->credit_room);
    if (!connection->credits) abort();
  }
  memcpy(connection->credits + connection->num_credits, record, sizeof *record);
  ((struct record *)(connection->credits + connection->num_credits))->magic = RECORD_MAGIC;
  connection->num_credits += sizeof *record;
  connection->channel->num_owed += sizeof *record;
}

static void count_bytes(struct connection *connection, ssize_t num_bytes) {
  connection->channel->num_bytes += (uint64_t)num_bytes;
  atomic_fetch_add_explicit(&connection->channel->host->progress.num_bytes, (uint64_t)num_bytes, memory_order_relaxed);
}

struct posted *connection_find(struct connection *connection, uint64_t seq, uint32_t chunk) {
  for (int i = 0; i < connection->num_outstanding; i++) {
    struct posted *each = connection->outstanding + i;
    if (each->seq == seq && each->chunk == chunk) return each;
  }
  return NULL;
}

void connection_remove(struct connection *connection, struct posted *posted) {
  struct posted *end = connection->outstanding + --connection->num_outstanding;
  memmove(posted, posted + 1, (size_t)((char *)end - (char *)posted));
}

/* Begin the next chunk; chunks that the peer has got over another rail meanwhile are left out. */
static bool begin_frame(struct connection *connection) {
  for (int i = 0; i < connection->num_outstanding; i++) {
    struct posted *each = connection->outstanding + i;
    if (!each->is_queued) continue;
    const struct request *message = messages_outgoing(connection->channel, each->seq, each->chunk);
    if (!message) {
      connection_remove(connection, each);
      scheduler_completed(&connection->channel->scheduler, connection->rail, 0);
      i--;
      continue;
    }
    each->is_queued = false;
    each->end = connection->num_written + RECORD_BYTES + each->num_bytes;
    connection->frame = (struct record){.seq = each->seq, .size = message->size, .slot = each->chunk, .mask = each->num_bytes,
                                        .kind = message->is_too_large ? TOO_LARGE : DATA, .magic = RECORD_MAGIC};
    connection->has_frame = true;
    connection->frame_sent = 0;
    return true;
  }
  return false;
}

bool connection_has_output(const struct connection *connection) {
  if (connection->has_frame || connection->num_credits) return true;
  for (int i = 0; i < connection->num_outstanding; i++) {
    if (connection->outstanding[i].is_queued) return true;
  }
  return false;
}

/* Write some of the frame; the number of bytes, or -1 with errno. */
static ssize_t write_frame(struct connection *connection) {
  struct record *frame = &connection->frame;
  size_t header = connection->frame_sent < RECORD_BYTES ? RECORD_BYTES - connection->frame_sent : 0;
  size_t done = connection->frame_sent < RECORD_BYTES ? 0 : connection->frame_sent - RECORD_BYTES;
  size_t left = frame->mask - done;
  const struct request *message = connection->kept ? NULL : messages_outgoing(connection->channel, frame->seq, frame->slot);
  const char *payload = (char *)connection->kept;
  if (message) messages_payload(connection->channel, message, frame->slot, &payload);
  if (payload) {
    payload += done;
  } else {
    payload = ZEROS;
    left = left < sizeof ZEROS ? left : sizeof ZEROS;
  }
  struct iovec parts[2] = {{(char *)frame + RECORD_BYTES - header, header}, {(char *)payload, left}};
  struct msghdr parcel = {.msg_iov = header ? parts : parts + 1, .msg_iovlen = header ? 2 : 1};
  ssize_t sent = sendmsg(connection->watched.fd, &parcel, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return sent;
  count_bytes(connection, sent);
  connection->num_written += (uint64_t)sent;
  connection->frame_sent += (size_t)sent;
  if (connection->frame_sent == RECORD_BYTES + frame->mask) {
    connection->has_frame = false;
    free(connection->kept);
    connection->kept = NULL;
  }
  return sent;
}

static ssize_t write_credits(struct connection *connection) {
  size_t left = connection->num_credits - connection->credits_sent;
  ssize_t sent = send(connection->watched.fd, connection->credits + connection->credits_sent, left, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return sent;
  count_bytes(connection, sent);
  connection->num_written += (uint64_t)sent;
  connection->channel->num_owed -= (uint64_t)sent;
  connection->credits_sent += (size_t)sent;
  if (connection->credits_sent == connection->num_credits) connection->num_credits = connection->credits_sent = 0;
  return sent;
}

const char *connection_write(struct connection *connection) {
  connection->wants_write = false;
  for (;;) {
    ssize_t sent;
    /* What has begun is finished first: a frame, or records of which a part is out. */
    if (connection->num_credits && !connection->has_frame) {
      sent = write_credits(connection);
    } else if (connection->has_frame || begin_frame(connection)) {
      sent = write_frame(connection);
    } else {
      return NULL;
    }
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) return errno == EPIPE ? PEER_CLOSED : strerror(errno);
      connection->wants_write = true;
      return NULL;
    }
  }
}

/* Take a complete header; NULL, or why the connection must end. */
static const char *take_header(struct connection *connection) {
  struct record *record = &connection->record;
  connection->num_header = 0;
  if (record->magic != RECORD_MAGIC || record->kind < DATA || record->kind > BYE || record->size > INT64_MAX) {
    return "bytes that are not a record";
  }
  if (record->kind != DATA && record->kind != TOO_LARGE) return connection->take(connection, record, true);
  connection->reads_payload = true;
  connection->num_payload = 0;
  return NULL;
}

const char *connection_read(struct connection *connection, ssize_t budget) {
  struct channel *channel = connection->channel;
  struct record *record = &connection->record;
  const char *why = NULL;
  bool has_payload = false;
  while (budget > 0 && !connection->is_closed && !why) {
    if (connection_owes_too_much(connection)) return NOT_READ;
    bool is_wanted = false;
    char *memory = (char *)record + connection->num_header;
    size_t room = RECORD_BYTES - connection->num_header;
    if (connection->reads_payload) {
      memory = messages_target(channel, record, &is_wanted, &why);
      if (why) break;
      room = record->mask - connection->num_payload;
      if (is_wanted) {
        memory += connection->num_payload;
      } else {
        memory = channel->loop->scratch;
        room = room < sizeof channel->loop->scratch ? room : sizeof channel->loop->scratch;
      }
    }
    ssize_t num = room ? recv(connection->watched.fd, memory, room, MSG_DONTWAIT) : 0;
    if (num < 0) {
      if (errno == EAGAIN || errno == EINTR) break;
      why = errno == EPIPE ? PEER_CLOSED : strerror(errno);
      break;
    }
    if (room && !num) {
      why = PEER_CLOSED;
      break;
    }
    budget -= num;
    count_bytes(connection, num);
    if (!connection->reads_payload) {
      connection->num_header += (size_t)num;
      if (connection->num_header == RECORD_BYTES) why = take_header(connection);
    } else {
      has_payload = true;
      connection->num_payload += (size_t)num;
      if (connection->num_payload == record->mask) {
        connection->reads_payload = false;
        why = connection->take(connection, record, is_wanted);
      }
    }
    if ((size_t)num < room) break; /* the socket is empty */
  }
  struct sharing *sharing = &channel->host->sharing;
  if (has_payload && sharing->direct >> connection->rail & 1) board_receiving(&sharing->board, connection->rail, !channel->num_begun, now_ns());
  return why;
}

void connection_note_passed(struct connection *connection, struct posted *posted) {
  double taken_s = (double)(now_ns() - posted->at_ns) / 1e9, typical_s = connection->typical_s;
  posted->has_passed = true;
  if (posted->is_late) { /* one late chunk changes little; if all are late, the estimate grows */
    connection->typical_s = taken_s < 1.5 * typical_s + 0.001 ? taken_s : 1.5 * typical_s + 0.001;
  } else {
    connection->typical_s += (taken_s - typical_s) / LATE_AVERAGED_OVER;
  }
  scheduler_completed(&connection->channel->scheduler, connection->rail, posted->num_bytes);
}

/* Take chunks that have left the network from the count of the rail; the peer may read them later. */
void connection_count_passed(struct connection *connection) {
  int num_unacked = -1;
  for (int i = 0; i < connection->num_outstanding; i++) {
    struct posted *each = connection->outstanding + i;
    if (each->has_passed || each->is_queued) continue;
    if (num_unacked < 0 && ioctl(connection->watched.fd, SIOCOUTQ, &num_unacked)) return;
    if (each->end + (uint64_t)num_unacked > connection->num_written) return;
    connection_note_passed(connection, each);
  }
}

/* Of chunks on a rail that was borrowed, put those back that are late, and, if its owner has begun to send, `withdraw` those
 * of which nothing was written. Late ones stay here, too: the first copy to arrive counts. */
void connection_put_back(struct connection *connection, int64_t now, bool withdraws) {
  struct channel *channel = connection->channel;
  double limit_s = LATE * connection->typical_s, least_s = host_least_late_s(channel->host, connection->rail);
  int64_t limit_ns = (int64_t)(1e9 * (limit_s > least_s ? limit_s : least_s));
  for (int i = 0; i < connection->num_outstanding; i++) {
    struct posted *each = connection->outstanding + i;
    bool was_late = each->is_late, goes = withdraws && each->is_queued;
    each->is_late = was_late || (!each->has_passed && now - each->at_ns > limit_ns);
    if ((goes || each->is_late) && !was_late) messages_put_back(channel, each->seq, each->chunk);
    if (!goes) continue;
    connection_remove(connection, each);
    scheduler_completed(&channel->scheduler, connection->rail, 0);
    i--;
  }
}

/* A peer that does not read closes its window, which is no failure of the rail. */
bool connection_is_stalled(struct connection *connection, int64_t now) {
  struct tcp_info info = {0};
  socklen_t num_bytes = sizeof info;
  if (getsockopt(connection->watched.fd, IPPROTO_TCP, TCP_INFO, &info, &num_bytes)) return false;
  if (!info.tcpi_unacked || info.tcpi_bytes_acked != connection->num_acked) {
    connection->num_acked = info.tcpi_bytes_acked;
    connection->progress_ns = now;
  }
  return now - connection->progress_ns > (int64_t)(1e9 * connection->channel->host->sharing.limits.stall_s);
}

/* Drop chunks that have not begun and copy one that has: their memory is the caller's again. */
void connection_release_memory(struct connection *connection) {
  for (int i = connection->num_outstanding - 1; i >= 0; i--) {
    if (connection->outstanding[i].is_queued) {
      connection_remove(connection, connection->outstanding + i);
      scheduler_completed(&connection->channel->scheduler, connection->rail, 0);
    }
  }
  const struct record *frame = &connection->frame;
  const struct request *message = connection->has_frame && !connection->kept ? messages_outgoing(connection->channel, frame->seq, frame->slot) : NULL;
  const char *payload;
  if (message && frame->mask) {
    messages_payload(connection->channel, message, frame->slot, &payload);
    connection->kept = malloc(frame->mask);
    if (!connection->kept) abort();
    memcpy(connection->kept, payload, frame->mask);
  }
}

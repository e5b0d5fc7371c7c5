/* Loops: each waits for the sockets of its channels and does what is due, in a thread of its own or polled. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_EVENTS = 64 };
static const int64_t CHECK_NS = 50000000, IDLE_CHECK_NS = 250000000, BOARD_NS = 250000000, RESCUE_NS = 2000000;

/* Wake other loops of the host whose channels wait for room on a rail, of which this one has given some back. */
static void wake_waiting(const struct loop *loop) {
  struct host *host = loop->host;
  for (unsigned waiting = host->waiting & ~(1u << loop->index), i = 0; waiting; waiting >>= 1, i++) {
    if (waiting & 1 && host->loops[i].is_asleep) loop_wake(host->loops + i);
  }
}

static void release_dead(struct loop *loop) {
  while (loop->dead) {
    struct watched *dead = loop->dead;
    loop->dead = dead->next_dead;
    dead->release(dead);
  }
}

/* Handle what callers have posted. */
void loop_take_ready(struct loop *loop) {
  for (;;) {
    pthread_mutex_lock(&loop->lock);
    struct channel *channel = loop->ready;
    if (channel) {
      loop->ready = channel->next_ready;
      channel->is_ready = false;
    }
    pthread_mutex_unlock(&loop->lock);
    if (!channel) return;
    if (!channel->is_added) {
      channel->is_added = true;
      channel->next_in_loop = loop->channels;
      loop->channels = channel;
      loop->next_check_ns = 0;
    }
    channel_ready(channel);
  }
}

/* Leave a channel that is no longer in the loop's list to its owner. */
static void leave(struct loop *loop, struct channel *channel) {
  pthread_mutex_lock(&loop->lock);
  bool is_released = channel->is_released;
  bool is_queued = channel->is_ready; /* it is freed later, then */
  channel->is_added = is_queued ? false : channel->is_added; /* the next look adds it again */
  channel->is_ended = !is_queued;
  if (!is_queued) channel->host = NULL;
  if (!is_queued) atomic_store(&channel->is_closed, true);
  pthread_mutex_unlock(&loop->lock); /* from here on it may be freed by its owner */
  if (!is_queued && is_released) channel_free(channel);
  if (!is_queued) host_changed(loop->host);
}

static void remove_ended(struct loop *loop) {
  for (struct channel **at = &loop->channels; *at;) {
    struct channel *channel = *at;
    if (!channel_has_ended(channel)) {
      at = &channel->next_in_loop;
      continue;
    }
    *at = channel->next_in_loop;
    if (loop->turn == channel) loop->turn = NULL;
    release_dead(loop); /* connections of it */
    leave(loop, channel);
  }
}

static void check(struct loop *loop, int64_t now) {
  struct host *host = loop->host;
  int64_t looked_ns = now - loop->checked_ns;
  bool is_busy = false;
  loop->clock_ns += looked_ns < IDLE_CHECK_NS ? looked_ns : IDLE_CHECK_NS;
  loop->checked_ns = now;
  if (!loop->index) {
    host_check_links(host);
    joining_check_host(host, now);
    if (now >= loop->next_board_ns) {
      loop->next_board_ns = now + BOARD_NS;
      board_reset_dead(&host->sharing.board);
    }
    is_busy = host->num_loops > 1; /* other loops need to know of links */
  }
  for (struct channel *channel = loop->channels, *next; channel; channel = next) {
    next = channel->next_in_loop;
    if (channel_check(channel, loop->clock_ns, host->links, &is_busy)) joining_dial(channel, loop->clock_ns, host->links);
    channel_check_rails(channel, loop->clock_ns);
  }
  loop->next_check_ns = now + (is_busy ? CHECK_NS : IDLE_CHECK_NS);
}

/* Do what is due for all channels, each of which is the first in turn; return the nanoseconds until something is due again. */
static int64_t step(struct loop *loop) {
  struct host *host = loop->host;
  int64_t now = now_ns();
  loop_take_ready(loop);
  if (now >= loop->next_check_ns) check(loop, now);
  int64_t wait_ns = loop->next_check_ns - now;
  bool waits = false, rescues = now >= loop->next_rescue_ns;
  if (rescues) loop->next_rescue_ns = now + RESCUE_NS;
  struct channel *first = loop->turn ? loop->turn : loop->channels;
  for (struct channel *channel = first; channel; channel = channel->next_in_loop) channel_step(channel, now, rescues, &wait_ns);
  for (struct channel *channel = loop->channels; channel != first; channel = channel->next_in_loop) channel_step(channel, now, rescues, &wait_ns);
  for (struct channel *channel = loop->channels; channel && !waits; channel = channel->next_in_loop) waits = channel_waits(channel);
  loop->turn = first ? first->next_in_loop : NULL;
  if (host->num_loops == 1) return wait_ns;
  if (scheduler_gave_back()) wake_waiting(loop);
  if (waits) {
    atomic_fetch_or(&host->waiting, 1u << loop->index);
  } else if (host->waiting >> loop->index & 1) {
    atomic_fetch_and(&host->waiting, ~(1u << loop->index));
  }
  return wait_ns;
}

/* epoll_wait with a limit in nanoseconds; in milliseconds, longer than a chunk takes at 10 Gbit/s, before Linux 5.11 and
 * where a container's filter of system calls does not know the other (EPERM). */
static int wait_for_events(const struct loop *loop, struct epoll_event *events, int64_t limit_ns) {
  struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
#if defined SYS_epoll_pwait2 && !defined __SANITIZE_THREAD__ /* which does not know it */
  int num = limit_ns ? (int)syscall(SYS_epoll_pwait2, loop->epoll_fd, events, MAX_EVENTS, &limit, NULL, 0) : -1;
  if (limit_ns && (num >= 0 || errno == EINTR)) return num;
#endif
  return epoll_wait(loop->epoll_fd, events, MAX_EVENTS, (int)(limit.tv_sec * 1000 + (limit.tv_nsec + 999999) / 1000000));
}

static void handle_events(struct loop *loop, int64_t limit_ns) {
  struct epoll_event events[MAX_EVENTS];
  int num = wait_for_events(loop, events, limit_ns);
  atomic_store(&loop->is_asleep, false);
  for (int i = 0; i < num; i++) {
    struct watched *watched = events[i].data.ptr;
    if (!watched) {
      uint64_t count;
      if (read(loop->wake_fd, &count, sizeof count) < 0) continue;
    } else if (watched->on_event) { /* another handler may have closed it */
      watched->on_event(watched, events[i].events);
    }
  }
  release_dead(loop);
  remove_ended(loop);
}

int64_t loop_poll(struct loop *loop) {
  int64_t wait_ns = step(loop);
  handle_events(loop, 0);
  loop_take_ready(loop);
  return wait_ns;
}

static void *run(void *argument) {
  struct loop *loop = argument;
  while (!loop->ends) {
    int64_t wait_ns = step(loop);
    atomic_store(&loop->is_asleep, true); /* before what is ready is looked at, so that nothing is missed */
    pthread_mutex_lock(&loop->lock);
    bool has_work = loop->ready != NULL || loop->ends;
    pthread_mutex_unlock(&loop->lock);
    handle_events(loop, has_work || wait_ns <= 0 ? 0 : wait_ns);
  }
  loop_take_ready(loop); /* channels and connections that came meanwhile end with the others */
  return NULL;
}

bool loop_open(struct loop *loop, struct host *host, int index) {
  loop->host = host;
  loop->index = index;
  loop->checked_ns = now_ns();
  loop->clock_ns = 1000000000; /* 0 is never */
  loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  loop->wake_fd = loop->epoll_fd < 0 ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  pthread_mutex_init(&loop->lock, NULL);
  struct epoll_event event = {.events = EPOLLIN};
  return loop->wake_fd >= 0 && !epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->wake_fd, &event);
}

bool loop_start(struct loop *loop) {
  errno = pthread_create(&loop->thread, NULL, run, loop);
  if (errno) return false;
  loop->is_started = true;
  char name[16] = "fusco-rails-0";
  name[12] = (char)('0' + loop->index);
  pthread_setname_np(loop->thread, name);
  return true;
}

void loop_stop(struct loop *loop) {
  if (!loop->is_started) return;
  loop->is_started = false;
  atomic_store(&loop->ends, true);
  loop_wake(loop);
  pthread_join(loop->thread, NULL);
}

/* After loop_stop and joining_stop. Its channels end, and stay with their owners. */
void loop_free(struct loop *loop) {
  loop_take_ready(loop);
  while (loop->channels) {
    struct channel *channel = loop->channels;
    loop->channels = channel->next_in_loop;
    channel_abandon(channel);
    channel->host = NULL;
    atomic_store(&channel->is_closed, true);
    if (channel->is_released) channel_free(channel);
  }
  release_dead(loop);
  if (loop->epoll_fd >= 0) close(loop->epoll_fd);
  if (loop->wake_fd >= 0) close(loop->wake_fd);
}

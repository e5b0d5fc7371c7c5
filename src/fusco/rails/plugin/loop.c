/* Threads of the process: each waits for the sockets of its channels and does what is due. */
#define _GNU_SOURCE
#include "rails.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_EVENTS = 64 };
static const int64_t CHECK_NS = 50000000, IDLE_CHECK_NS = 250000000, BOARD_NS = 250000000;

int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void wake(struct loop *loop) {
  uint64_t one = 1;
  if (write(loop->wake_fd, &one, sizeof one) < 0) return; /* the counter is full, so it wakes anyway */
}

void loop_wake_waiting(void) {
  for (unsigned waiting = the_host->waiting, i = 0; waiting; waiting >>= 1, i++) {
    if (waiting & 1 && the_host->loops[i].is_asleep) wake(the_host->loops + i);
  }
}

void loop_kick(struct channel *channel, bool closes) {
  struct loop *loop = channel->loop;
  pthread_mutex_lock(&loop->lock);
  channel->closes |= closes;
  if (!channel->is_ready) {
    channel->is_ready = true;
    channel->next_ready = loop->ready;
    loop->ready = channel;
  }
  pthread_mutex_unlock(&loop->lock);
  if (loop->is_asleep) wake(loop);
}

const char *loop_add(struct loop *loop, struct watched *watched, uint32_t events) {
  struct epoll_event event = {.events = events, .data.ptr = watched};
  return epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, watched->fd, &event) ? strerror(errno) : NULL;
}

void loop_watch(struct loop *loop, struct watched *watched, uint32_t events) { /* needs no memory, so it cannot fail */
  struct epoll_event event = {.events = events, .data.ptr = watched};
  epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, watched->fd, &event);
}

int loop_detach(struct loop *loop, struct watched *watched) {
  int fd = watched->fd;
  if (fd < 0) return fd;
  epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
  watched->fd = -1;
  watched->on_event = NULL;
  watched->next_dead = loop->dead;
  loop->dead = watched;
  return fd;
}

void loop_forget(struct loop *loop, struct watched *watched, bool aborts) {
  int fd = loop_detach(loop, watched);
  if (fd < 0) return;
  if (aborts) { /* the peer's end is reset */
    struct linger none = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  }
  close(fd);
}

static void release_dead(struct loop *loop) {
  while (loop->dead) {
    struct watched *dead = loop->dead;
    loop->dead = dead->next_dead;
    dead->release(dead);
  }
}

/* Handle what NCCL's threads have posted. */
static void take_ready(struct loop *loop) {
  for (;;) {
    pthread_mutex_lock(&loop->lock);
    struct channel *channel = loop->ready;
    bool closes = channel && channel->closes;
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
    channel_ready(channel, closes);
  }
}

/* Leave channels that have ended to those who wait for that. */
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
    atomic_store(&channel->is_closed, true);
  }
}

static void check(struct loop *loop, int64_t now, int64_t *next_board_ns) {
  bool is_busy = false;
  if (!loop->index) {
    host_check_links();
    joining_check_host(the_host, now);
    if (now >= *next_board_ns) {
      *next_board_ns = now + BOARD_NS;
      board_reset_dead(&the_host->board);
    }
    is_busy = the_host->num_loops > 1; /* other loops need to know of links */
  }
  for (struct channel *channel = loop->channels, *next; channel; channel = next) {
    next = channel->next_in_loop;
    channel_check(channel, now, the_host->links, &is_busy);
  }
  loop->next_check_ns = now + (is_busy ? CHECK_NS : IDLE_CHECK_NS);
}

/* Do what is due for all channels, each of which is the first in turn; the loop is woken if one waits for a rail. */
static void step_channels(struct loop *loop, int64_t now, int64_t *wait_ns) {
  bool waits = false;
  struct channel *first = loop->turn ? loop->turn : loop->channels;
  for (struct channel *channel = first; channel; channel = channel->next_in_loop) channel_step(channel, now, wait_ns);
  for (struct channel *channel = loop->channels; channel != first; channel = channel->next_in_loop) channel_step(channel, now, wait_ns);
  for (struct channel *channel = loop->channels; channel && !waits; channel = channel->next_in_loop) waits = channel_waits(channel);
  loop->turn = first ? first->next_in_loop : NULL;
  if (waits) {
    atomic_fetch_or(&the_host->waiting, 1u << loop->index);
  } else if (the_host->waiting >> loop->index & 1) {
    atomic_fetch_and(&the_host->waiting, ~(1u << loop->index));
  }
}

/* epoll_wait with a limit in nanoseconds; in milliseconds, longer than a chunk takes at 10 Gbit/s, before Linux 5.11 and
 * where a container's filter of system calls does not know the other (EPERM). */
static int wait_for_events(const struct loop *loop, struct epoll_event *events, int64_t limit_ns) {
  struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
#ifdef SYS_epoll_pwait2
  int num = (int)syscall(SYS_epoll_pwait2, loop->epoll_fd, events, MAX_EVENTS, &limit, NULL, 0);
  if (num >= 0 || errno == EINTR) return num;
#endif
  return epoll_wait(loop->epoll_fd, events, MAX_EVENTS, (int)(limit.tv_sec * 1000 + (limit.tv_nsec + 999999) / 1000000));
}

static void *run(void *argument) {
  struct loop *loop = argument;
  struct epoll_event events[MAX_EVENTS];
  int64_t next_board_ns = 0;
  while (!loop->ends) {
    take_ready(loop);
    int64_t now = now_ns();
    if (now >= loop->next_check_ns) check(loop, now, &next_board_ns);
    int64_t wait_ns = loop->next_check_ns - now;
    step_channels(loop, now, &wait_ns);
    atomic_store(&loop->is_asleep, true); /* before what is ready is looked at, so that nothing is missed */
    pthread_mutex_lock(&loop->lock);
    bool has_work = loop->ready != NULL || loop->ends;
    pthread_mutex_unlock(&loop->lock);
    int num = wait_for_events(loop, events, has_work || wait_ns <= 0 ? 0 : wait_ns);
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
  take_ready(loop); /* channels and connections that came meanwhile end with the others */
  return NULL;
}

bool loop_start(struct loop *loop, int index) {
  loop->index = index;
  loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  loop->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  pthread_mutex_init(&loop->lock, NULL);
  struct epoll_event event = {.events = EPOLLIN};
  bool works = loop->epoll_fd >= 0 && loop->wake_fd >= 0 && !epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->wake_fd, &event);
  if (works) {
    errno = pthread_create(&loop->thread, NULL, run, loop);
    works = !errno;
  }
  if (works) {
    char name[16] = "fusco-rails-0";
    name[12] = (char)('0' + index);
    pthread_setname_np(loop->thread, name);
  }
  return works;
}

void loop_stop(struct loop *loop) {
  atomic_store(&loop->ends, true);
  wake(loop);
  pthread_join(loop->thread, NULL);
}

/* After loop_stop and joining_stop. */
void loop_free(struct loop *loop) {
  for (struct channel *channel = loop->channels, *next; channel; channel = next) { /* those that NCCL has not closed */
    next = channel->next_in_loop;
    for (int rail = 0; rail < channel->num_rails; rail++) {
      if (channel->connections[rail]) channel_end(channel->connections[rail], true);
    }
    joining_give_up(channel);
    channel_free(channel);
  }
  release_dead(loop);
  close(loop->epoll_fd);
  close(loop->wake_fd);
}

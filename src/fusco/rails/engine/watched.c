/* What a loop looks at: descriptors, and channels for which callers have posted something. */
#include "engine.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

void loop_wake(struct loop *loop) {
  uint64_t one = 1;
  if (write(loop->wake_fd, &one, sizeof one) < 0) return; /* the counter is full, so it wakes anyway */
}

bool loop_kick(struct channel *channel, bool closes, bool is_released) {
  struct loop *loop = channel->loop;
  pthread_mutex_lock(&loop->lock);
  bool is_ended = channel->is_ended;
  channel->closes |= closes;
  channel->is_released |= is_released;
  if (!is_ended && !channel->is_ready) {
    channel->is_ready = true;
    channel->next_ready = loop->ready;
    loop->ready = channel;
  }
  pthread_mutex_unlock(&loop->lock);
  if (!is_ended && loop->is_asleep) loop_wake(loop);
  return !is_ended;
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

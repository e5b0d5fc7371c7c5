/* What all channels of an endpoint share: its links, its traffic class, its changes and its log. */
#define _GNU_SOURCE
#include "engine.h"

#include <limits.h>
#include <linux/futex.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

bool host_defers(const struct host *host, int rail) { return host->sharing.policy.defers && !(host->sharing.direct >> rail & 1); }

double host_least_late_s(const struct host *host, int rail) {
  const struct limits *limits = &host->sharing.limits;
  double bits = 8.0 * limits->chunk_bytes * limits->borrowed_per_rail, speed = (double)host->rails[rail].named.bits_per_s;
  double both_s = speed > 0 ? 2 * bits / speed : 0; /* twice those of all that may be on it */
  return both_s > limits->hold_s ? both_s : limits->hold_s;
}

void host_check_links(struct host *host) {
  uint32_t links = 0;
  for (int i = 0; i < host->sharing.num_rails; i++) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    memcpy(request.ifr_name, host->rails[i].named.interface, sizeof request.ifr_name);
    bool has_link = !ioctl(host->query_fd, SIOCGIFFLAGS, &request) && (request.ifr_flags & (IFF_UP | IFF_RUNNING)) == (IFF_UP | IFF_RUNNING);
    links |= (uint32_t)has_link << i;
  }
  atomic_store(&host->links, links);
}

void host_changed(struct host *host) {
  host->progress.changes++;
  if (host->progress.num_waiting) syscall(SYS_futex, &host->progress.changes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

bool host_wait(struct host *host, uint32_t seen, int64_t limit_ns) {
  struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
  host->progress.num_waiting++;
  syscall(SYS_futex, &host->progress.changes, FUTEX_WAIT_PRIVATE, seen, &limit, NULL, 0);
  host->progress.num_waiting--;
  return host->progress.changes != seen;
}

void say(const struct host *host, bool warns, const char *format, ...) {
  char text[4096];
  if (!host->log) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  host->log(warns, text);
}

void set_port(struct sockaddr_storage *address, int port) {
  if (address->ss_family == AF_INET6) {
    ((struct sockaddr_in6 *)address)->sin6_port = htons((uint16_t)port);
  } else {
    ((struct sockaddr_in *)address)->sin_port = htons((uint16_t)port);
  }
}

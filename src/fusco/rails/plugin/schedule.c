/* Choice of a rail for each chunk of a channel: schedule.py and scheduler.py. */
#include "rails.h"

bool batch_is_over(const struct batch *batch) { return batch->left <= 0 || now_ns() >= batch->end_ns; }

void batch_begin(struct batch *batch) {
  batch->left = the_host->limits.batch;
  batch->end_ns = now_ns() + (int64_t)(1e9 * the_host->limits.refresh_s);
}

/* The rail with the least load, if that is below the bound; the lowest of equals. */
static int least(const int *load, uint32_t rails, int bound) {
  int best = WAIT;
  for (int rail = 0; rails; rail++, rails >>= 1) {
    if (rails & 1 && load[rail] < bound) {
      best = rail;
      bound = load[rail];
    }
  }
  return best;
}

static int choose(const struct channel *channel) {
  const struct limits *limits = &the_host->limits;
  int on_direct[MAX_RAILS];
  for (int rail = 0; rail < channel->num_rails; rail++) on_direct[rail] = the_host->num_on_rail[rail];
  uint32_t usable = channel->usable, direct = the_host->direct & usable;
  if (the_host->policy == SPRAY) return least(channel->num_on_rail, usable, limits->direct_depth);
  if (!direct) { /* among the others; busy ones are better than none */
    int rail = least(channel->borrowed, usable & channel->idle, limits->borrowed_per_rail);
    return rail != WAIT ? rail : least(channel->borrowed, usable, limits->borrowed_per_rail);
  }
  if (the_host->policy == FUSELINK) {
    int rail = least(on_direct, direct, limits->direct_first);
    if (rail == WAIT) rail = least(channel->borrowed, channel->idle & usable & ~direct, limits->borrowed_per_rail);
    if (rail != WAIT) return rail;
  }
  return least(on_direct, direct, limits->direct_depth);
}

static void refresh(struct channel *channel) {
  batch_begin(&channel->sending);
  if (the_host->policy == FUSELINK) channel->idle = board_idle(&the_host->board, the_host, LAST_TX) & channel->peer_idle;
  if (the_host->policy == SPRAY) return;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    if (channel->usable & ~the_host->direct & 1u << rail) channel->borrowed[rail] = board_borrowed(&the_host->board, rail);
  }
}

int schedule_choose(struct channel *channel) {
  const struct limits *limits = &the_host->limits;
  if (batch_is_over(&channel->sending)) refresh(channel);
  int rail;
  while ((rail = choose(channel)) != WAIT && !(the_host->direct >> rail & 1)) {
    if (board_take(&the_host->board, rail, the_host->policy == SPRAY ? 0 : limits->borrowed_per_rail)) {
      channel->borrowed[rail]++;
      break;
    }
    channel->borrowed[rail] = limits->borrowed_per_rail; /* another worker was quicker */
  }
  if (rail == WAIT) return WAIT;
  channel->num_on_rail[rail]++;
  the_host->num_on_rail[rail]++;
  channel->sending.left--;
  board_post(&the_host->board, rail);
  return rail;
}

void schedule_completed(struct channel *channel, int rail, size_t num_bytes) {
  channel->num_on_rail[rail]--;
  the_host->num_on_rail[rail]--;
  if (!(the_host->direct >> rail & 1)) {
    channel->borrowed[rail]--;
    board_give_back(&the_host->board, rail);
  }
  board_complete(&the_host->board, rail, num_bytes);
  loop_wake_waiting();
}

/* Credits of several rails may come out of order; the newest counts. */
void schedule_credit(struct channel *channel, uint32_t idle, uint32_t epoch) {
  uint32_t ahead = epoch - channel->peer_epoch;
  if (ahead && ahead < 1u << 31) {
    channel->peer_epoch = epoch;
    channel->peer_idle = idle;
  }
}

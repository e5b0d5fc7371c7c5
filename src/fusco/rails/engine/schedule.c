/* The rules of the scheduler, then their use for one channel: batches of knowledge, and chunks counted on the board. */
#include "schedule.h"

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

/* FUSELINK: the direct rail up to `direct_first`, then idle ones up to the bound of borrowed chunks, then the direct one
 * up to `direct_depth`. DIRECT: the direct one only. SPRAY: all alike. Without a direct rail that works, the others; busy
 * ones are better than none. */
int choose_rail(const struct view *view, enum rule rule, const struct limits *limits) {
  uint32_t direct = view->direct & view->usable, indirect = view->usable & ~view->direct;
  int rail = WAIT;
  if (rule == SPRAY) return least(view->outstanding, view->usable, limits->direct_depth);
  if (!direct) {
    rail = least(view->borrowed, indirect & view->idle, limits->borrowed_per_rail);
    return rail != WAIT ? rail : least(view->borrowed, indirect, limits->borrowed_per_rail);
  }
  if (rule == FUSELINK) rail = least(view->outstanding, direct, limits->direct_first);
  if (rule == FUSELINK && rail == WAIT) rail = least(view->borrowed, indirect & view->idle, limits->borrowed_per_rail);
  return rail != WAIT ? rail : least(view->outstanding, direct, limits->direct_depth);
}

/* The rails that no other owner sends over (LAST_TX) or receives over (LAST_RX). */
static uint32_t idle_rails(struct sharing *sharing, int field) {
  int64_t now = now_ns();
  if (sharing->policy.monitor == BY_ACTIVITY) return board_idle(&sharing->board, sharing->num_rails, sharing->hold_ns, field, now);
  pthread_mutex_lock(&sharing->lock);
  uint32_t idle = board_without_completions(&sharing->board, sharing->num_rails, &sharing->completions, (int64_t)(1e9 * sharing->limits.hold_s),
                                            field == LAST_TX ? COMPLETED : RX_CHUNKS, now);
  pthread_mutex_unlock(&sharing->lock);
  return idle;
}

static bool is_over(const struct batch *batch, const struct sharing *sharing) {
  return batch->left <= 0 || (sharing->policy.refreshes && now_ns() >= batch->end_ns);
}

static void begin(struct batch *batch, const struct sharing *sharing) {
  batch->left = sharing->limits.batch;
  batch->end_ns = now_ns() + (int64_t)(1e9 * sharing->limits.refresh_s);
}

static void refresh(struct scheduler *scheduler) {
  struct sharing *sharing = scheduler->sharing;
  struct view *view = &scheduler->view;
  begin(&scheduler->sending, sharing);
  if (sharing->policy.rule == FUSELINK) view->idle = idle_rails(sharing, LAST_TX);
  if (sharing->policy.heeds_receiver) view->idle &= scheduler->peer_idle;
  for (int rail = 0; rail < sharing->num_rails; rail++) {
    if (!(view->usable & ~view->direct & 1u << rail)) continue;
    view->borrowed[rail] = sharing->policy.bound == OF_RAIL ? board_borrowed(&sharing->board, rail) : board_borrowed_by_this(&sharing->board, rail);
  }
}

static _Thread_local bool gave_back;

void scheduler_init(struct scheduler *scheduler, struct sharing *sharing) {
  *scheduler = (struct scheduler){.sharing = sharing, .view.direct = sharing->direct, .peer_idle = (1u << MAX_RAILS) - 1};
}

int scheduler_next(struct scheduler *scheduler) {
  struct sharing *sharing = scheduler->sharing;
  struct view *view = &scheduler->view, all;
  const struct limits *limits = &sharing->limits;
  if (is_over(&scheduler->sending, sharing)) refresh(scheduler);
  int rail, bound = sharing->policy.bound == OF_RAIL ? limits->borrowed_per_rail : 0;
  for (;;) {
    const struct view *seen = view;
    if (sharing->counts_all && sharing->policy.rule != SPRAY) {
      all = *view;
      for (int i = 0; i < sharing->num_rails; i++) all.outstanding[i] = sharing->num_on_rail[i];
      seen = &all;
    }
    rail = choose_rail(seen, (enum rule)sharing->policy.rule, limits);
    if (rail == WAIT) return WAIT;
    if (view->direct >> rail & 1) break;
    if (board_take(&sharing->board, rail, bound)) {
      view->borrowed[rail]++;
      break;
    }
    view->borrowed[rail] = limits->borrowed_per_rail; /* another worker was quicker */
  }
  view->outstanding[rail]++;
  sharing->num_on_rail[rail]++;
  scheduler->sending.left--;
  board_post(&sharing->board, rail, 1, now_ns());
  return rail;
}

uint32_t scheduler_busy(struct scheduler *scheduler) {
  const struct view *view = &scheduler->view;
  if (is_over(&scheduler->sending, scheduler->sharing)) refresh(scheduler);
  return view->direct & view->usable ? ~(view->idle | view->direct) : 0;
}

void scheduler_completed(struct scheduler *scheduler, int rail, size_t num_bytes) {
  struct sharing *sharing = scheduler->sharing;
  scheduler->view.outstanding[rail]--;
  sharing->num_on_rail[rail]--;
  if (!(sharing->direct >> rail & 1)) {
    scheduler->view.borrowed[rail]--;
    board_give_back(&sharing->board, rail, 1);
  }
  board_complete(&sharing->board, rail, 1, num_bytes, now_ns());
  gave_back = true;
}

bool scheduler_gave_back(void) {
  bool has = gave_back;
  gave_back = false;
  return has;
}

/* Credits of several rails may come out of order; the newest counts. Epochs are counted modulo 2**32. */
void scheduler_credit(struct scheduler *scheduler, uint32_t idle, uint32_t epoch) {
  uint32_t ahead = epoch - scheduler->peer_epoch;
  if (ahead && ahead < 1u << 31) {
    scheduler->peer_epoch = epoch;
    scheduler->peer_idle = idle;
  }
}

void scheduler_stamp(struct scheduler *scheduler, uint32_t *idle, uint32_t *epoch) {
  if (is_over(&scheduler->crediting, scheduler->sharing)) {
    scheduler->idle_here = idle_rails(scheduler->sharing, LAST_RX);
    begin(&scheduler->crediting, scheduler->sharing);
  }
  scheduler->crediting.left--;
  *idle = scheduler->idle_here;
  *epoch = ++scheduler->epoch;
}

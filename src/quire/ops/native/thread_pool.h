/* Threads that run a job together with the caller. They spin for a moment before they sleep, because a step is a sequence of
   short jobs. */

#pragma once
#include <stdatomic.h>
#include <stdint.h>

typedef void (*Job)(void *context, int workers);

/* Returns when all workers are done. If others are at it just now, the caller works alone. */
void run_together(Job job, void *context, int workers);

/* Within a job: where workers wait for each other, and how much of the work between two meetings is taken. Begins with zeros. */
typedef struct {
    _Atomic int arrived, round;
    _Atomic int64_t taken;
} Meeting;

void meet(Meeting *meeting, int workers);

/* the next `share` of `count` -> its end, or 0 = none is left */
static inline int64_t take(Meeting *meeting, int64_t count, int64_t share, int64_t *first) {
    *first = atomic_fetch_add_explicit(&meeting->taken, share, memory_order_relaxed);
    int64_t end = *first + share < count ? *first + share : count;
    return *first < count ? end : 0;
}

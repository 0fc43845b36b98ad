// How many tiles of C a job has written. The service never counts fewer tiles than before. Its answers and events come
// over several connections and overtake each other, so the larger count is the newer one.
export const newer = (before, now) => (before && before.done > (now?.done ?? 0) ? before : now);

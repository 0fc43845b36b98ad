/* Selects elements of one dtype. select.c includes this file once for each dtype, with these macros: SUM, the dtype of
 * the elements; SCORE and INDEX, those of selected elements; KEY, an integer of twice the size; NAME(x), the name of
 * the function x for this dtype. */

/* One of SELECTED in oocgemm/backends/base.py. */
struct NAME(kept) {
  SCORE score;
  INDEX index;
};

/* A row that is searched. */
struct NAME(row) {
  KEY *best, *found; /* the keys that are selected, in descending order, and those to be merged with them */
  size_t size;       /* keys in `found` */
};

#define BITS (8 * sizeof(INDEX))
#define SIGN ((INDEX)1 << (BITS - 1))

/* Returns the key of an element. Larger scores and, among equal ones, smaller indices have larger keys. NaN has a
 * smaller key than any number. */
ALWAYS KEY NAME(key)(SCORE score, INDEX index) {
  INDEX bits, high;
  SCORE sum = score + 0; /* makes -0 equal to 0 */
  memcpy(&bits, &sum, sizeof bits);
  high = score != score ? 0 : bits & SIGN ? ~bits : bits | SIGN;
  return (KEY)high << BITS | (INDEX)~index;
}

ALWAYS SCORE NAME(score)(INDEX high) {
  INDEX bits = high & SIGN ? high ^ SIGN : ~high;
  SCORE score;
  memcpy(&score, &bits, sizeof bits);
  return high ? score : (SCORE)NAN;
}

/* Merges arrays in descending order, and writes their `count` largest keys. */
static KEY *NAME(merge)(KEY *to, size_t count, const KEY *x, size_t x_size, const KEY *y, size_t y_size) {
  const KEY *x_end = x + x_size, *y_end = y + y_size;
  KEY *end = to + count;
  while (to < end && x < x_end && y < y_end) {
    bool second = *x < *y;
    *to++ = *x ^ ((*x ^ *y) & -(KEY)second);
    x += !second;
    y += second;
  }
  while (to < end && x < x_end)
    *to++ = *x++;
  while (to < end && y < y_end)
    *to++ = *y++;
  return to;
}

/* Sorts keys in descending order. Returns where they are: in `keys` or in `space`. */
static KEY *NAME(sort)(KEY *keys, size_t size, KEY *space) {
  for (size_t left = 0; left < size; left += RUN) {
    size_t end = size - left < RUN ? size : left + RUN;
    for (size_t i = left + 1; i < end; ++i) {
      KEY x = keys[i];
      size_t j = i;
      for (; j > left && keys[j - 1] < x; --j)
        keys[j] = keys[j - 1];
      keys[j] = x;
    }
  }
  for (size_t width = RUN; width < size; width *= 2) {
    KEY *to = space;
    for (size_t left = 0; left < size; left += 2 * width) {
      size_t first = size - left < width ? size - left : width;
      size_t second = size - left - first < width ? size - left - first : width;
      to = NAME(merge)(to, first + second, keys + left, first, keys + left + first, second);
    }
    to = keys;
    keys = space;
    space = to;
  }
  return keys;
}

/* Merges the keys that were found with the best ones. `found` and `space` have room for `count` keys. */
static void NAME(flush)(struct NAME(row) *row, size_t count, KEY *space) {
  KEY *sorted = NAME(sort)(row->found, row->size, space);
  KEY *to = sorted == space ? row->found : space;
  NAME(merge)(to, count, row->best, count, sorted, row->size);
  memcpy(row->best, to, count * sizeof *to);
  row->size = 0;
}

/* Returns the least score of a candidate, if no candidate to come has a smaller index; NaN if all elements are
 * candidates. So are all if -1 is one, since scaled elements are compared before they are clipped. */
ALWAYS SCORE NAME(least)(KEY last, size_t index, enum rule rule) {
  INDEX high = (INDEX)(last >> BITS), other = ~(INDEX)last;
  SCORE least = NAME(score)(high);
  if (other <= index && least < INFINITY)
    least = NAME(score)(high + 1); /* the next larger number */
  return least > -1 || rule != COSINES ? least : (SCORE)NAN;
}

/* Returns the score of an element before it is clipped. `factor` is the number of its row or its column, and `scales`
 * starts with that of the other one. */
ALWAYS SCORE NAME(scaled)(SUM sum, SCORE factor, const SCORE *scales, size_t i, enum rule rule) {
  return rule == COSINES    ? (SCORE)sum * (factor * scales[i])
         : rule == NEARNESS ? 2 * (SCORE)sum - (factor + scales[i])
                            : (SCORE)sum;
}

/* Returns a mask of candidates among `size` elements. Element i is compared with least[i * apart]. */
ALWAYS uint64_t NAME(candidates)(const SUM *sums, size_t size, SCORE factor, const SCORE *scales, const SCORE *least,
                                 size_t apart, enum rule rule) {
  INDEX any = 0;
  uint64_t mask = 0;
  for (size_t i = 0; i < size; ++i)
    any |= !(NAME(scaled)(sums[i], factor, scales, i, rule) < least[i * apart]);
  if (any)
    for (size_t i = 0; i < size; ++i)
      mask |= (uint64_t)!(NAME(scaled)(sums[i], factor, scales, i, rule) < least[i * apart]) << i;
  return mask;
}

/* Adds an element to a row, unless it is smaller than `least`. `count` candidates are merged at a time. */
ALWAYS void NAME(add)(struct NAME(row) *row, size_t count, KEY *space, SCORE score, enum rule rule, size_t index,
                      SCORE *least) {
  if (rule == NEARNESS)
    score = score > 0 ? 0 : score;
  if (rule == COSINES)
    score = score > 1 ? 1 : score < -1 ? -1 : score; /* keeps NaN */
  if (score < *least)
    return;
  row->found[row->size++] = NAME(key)(score, (INDEX)index);
  if (row->size < count)
    return;
  NAME(flush)(row, count, space);
  *least = NAME(least)(row->best[count - 1], index, rule);
}

static void NAME(load)(const struct ooc_selection *s, size_t row, KEY *to) {
  const struct NAME(kept) *kept = (const struct NAME(kept) *)s->kept + row * s->count;
  for (size_t i = 0; i < s->count; ++i)
    to[i] = NAME(key)(kept[i].score, kept[i].index);
}

static void NAME(save)(const struct ooc_selection *s, size_t row, struct NAME(row) *from, KEY *space) {
  struct NAME(kept) *kept = (struct NAME(kept) *)s->kept + row * s->count;
  if (from->size)
    NAME(flush)(from, s->count, space);
  for (size_t i = 0; i < s->count; ++i)
    kept[i] = (struct NAME(kept)){NAME(score)((INDEX)(from->best[i] >> BITS)), ~(INDEX)from->best[i]};
}

/* Searches rows whose elements are contiguous. `space` is for 3 * count keys. */
ALWAYS void NAME(search_along)(const struct ooc_selection *s, size_t from, size_t to, void *space, enum rule rule) {
  size_t count = s->count;
  KEY *keys = space;
  const SCORE *scales = rule ? (const SCORE *)s->col_factors + s->left : NULL;
  for (size_t i = from; i < to; ++i) {
    const SUM *sums = (const SUM *)s->sums + (ptrdiff_t)i * s->down;
    SCORE factor = rule ? ((const SCORE *)s->row_factors)[s->top + i] : 1;
    size_t own = s->excludes_self ? s->top + i - s->left : SIZE_MAX;
    struct NAME(row) row = {keys + count, keys + 2 * count, 0};
    NAME(load)(s, i, row.best);
    SCORE least = NAME(least)(row.best[count - 1], s->left, rule);
    for (size_t left = 0; left < s->cols; left += BLOCK) {
      size_t width = s->cols - left;
      const SCORE *scale = rule ? scales + left : NULL;
      uint64_t mask = width >= BLOCK ? NAME(candidates)(sums + left, BLOCK, factor, scale, &least, 0, rule)
                                     : NAME(candidates)(sums + left, width, factor, scale, &least, 0, rule);
      for (; mask; mask &= mask - 1) {
        size_t j = left + (size_t)__builtin_ctzll(mask);
        SCORE score = NAME(scaled)(sums[j], factor, scales, j, rule);
        if (j != own)
          NAME(add)(&row, count, keys, score, rule, s->left + j, &least);
      }
    }
    NAME(save)(s, i, &row, keys);
  }
}

/* Searches rows whose elements are far apart, while those of neighbouring rows are contiguous. `space` is for
 * (1 + 2 * height) * count keys, if `height` rows are searched together. */
ALWAYS void NAME(search_across)(const struct ooc_selection *s, size_t from, size_t to, void *space, enum rule rule) {
  size_t count = s->count, together = rows_together(count * sizeof(KEY));
  KEY *keys = space;
  struct NAME(row) rows[BLOCK];
  SCORE least[BLOCK];
  for (size_t top = from; top < to; top += together) {
    size_t height = to - top < together ? to - top : together;
    const SCORE *scales = rule ? (const SCORE *)s->row_factors + s->top + top : NULL;
    for (size_t i = 0; i < height; ++i) {
      rows[i] = (struct NAME(row)){keys + (2 * i + 1) * count, keys + (2 * i + 2) * count, 0};
      NAME(load)(s, top + i, rows[i].best);
      least[i] = NAME(least)(rows[i].best[count - 1], s->left, rule);
    }
    for (size_t j = 0; j < s->cols; ++j) {
      const SUM *sums = (const SUM *)s->sums + (ptrdiff_t)j * s->along + top;
      SCORE factor = rule ? ((const SCORE *)s->col_factors)[s->left + j] : 1;
      size_t own = s->excludes_self ? s->left + j - s->top - top : SIZE_MAX;
      uint64_t mask = height == BLOCK ? NAME(candidates)(sums, BLOCK, factor, scales, least, 1, rule)
                                      : NAME(candidates)(sums, height, factor, scales, least, 1, rule);
      for (; mask; mask &= mask - 1) {
        size_t i = (size_t)__builtin_ctzll(mask);
        SCORE score = NAME(scaled)(sums[i], factor, scales, i, rule);
        if (i != own)
          NAME(add)(rows + i, count, keys, score, rule, s->left + j, least + i);
      }
    }
    for (size_t i = 0; i < height; ++i)
      NAME(save)(s, top + i, rows + i, keys);
  }
}

/* The compiler makes a loop for each rule. */
#define SEARCH(WAY)                                                                                                   \
  WIDE static void NAME(WAY)(const struct ooc_selection *s, size_t from, size_t to, void *space) {                    \
    if (!s->row_factors)                                                                                              \
      NAME(search_##WAY)(s, from, to, space, PLAIN);                                                                  \
    else if (s->nearness)                                                                                             \
      NAME(search_##WAY)(s, from, to, space, NEARNESS);                                                               \
    else                                                                                                              \
      NAME(search_##WAY)(s, from, to, space, COSINES);                                                                \
  }
SEARCH(along)
SEARCH(across)

#undef SEARCH
#undef BITS
#undef SIGN
#undef SUM
#undef SCORE
#undef INDEX
#undef KEY
#undef NAME

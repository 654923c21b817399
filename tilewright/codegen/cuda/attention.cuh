// Attention for a block of queries: softmax(scale q k' + mask) v, the scores in registers alone. WARPS warps have
// ROWS x 16 queries each; keys and values come KEYS at a time, a pipeline of STAGES such tiles. The results end up in
// shared memory as rows of VALUES + 8 floats. Scores are scaled by log2(e) too, so that their weights are powers of two.

// PLAIN: nothing but the scale, between 0 and 1, happens to a score; it is then part of the weight's FMA.
template <class T, int WARPS, int ROWS, int KEYS, int WIDTH, int VALUES, int STAGES, bool CAUSAL, bool PLAIN, class Q,
          class K, class V>
struct Attention {
  static constexpr int QUERIES = WARPS * ROWS * 16;
  static constexpr int PITCH = VALUES + 8;
  static constexpr int STAGE = K::BYTES + V::BYTES;
  static constexpr int STEPS = WIDTH / 16;
  // Weights are relative to the highest score so far, or to one up to 2^8 below it: what there is so far is faded rarely.
  static constexpr f32 GROWTH = 8.0f;
  static constexpr bool HELD = ROWS * STEPS <= 8;  // the queries stay in registers
  using Left = Fragments<QUERIES, WIDTH, false, true>;
  using Right = Fragments<KEYS, WIDTH, false, false>;

  // The queries from `first` on, of `queries`; `mask` is what becomes of a score at a query and a key.
  template <class Mask>
  __device__ static void run(unsigned char* shared, Q& q, K& k, V& v, int first, int queries, int keys, f32 scale,
                             Mask mask) {
    const unsigned at_q = shared_address(shared), base = at_q + Q::BYTES, end = base + STAGES * STAGE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned first_q = Left::first(warp * ROWS * 16, lane), first_k = Right::first(0, lane), first_v = V::first(0, lane);
    const int last = CAUSAL ? min(keys, first + QUERIES) : keys;
    const int tiles = (last + KEYS - 1) / KEYS;

    q.fetch(at_q, 0, 1);
    q.finish(at_q);
    unsigned into = base, from = base;
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
      k.fetch(into, 0, 1);
      v.fetch(into + K::BYTES, 0, 1);
      k.finish(into);
      v.finish(into + K::BYTES);
      commit_copies();
      into += STAGE;
    }
    f32 sums[ROWS][VALUES / 8][4], top[ROWS][2], total[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) top[i][half] = -3.4028234663852886e38f, total[i][half] = 0.0f;
#pragma unroll
      for (int j = 0; j < VALUES / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
    }
    unsigned rows[HELD ? STEPS : 1][ROWS][4];

#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      await_copies<STAGES - 2>();
      __syncthreads();
      k.fetch(into, 0, 1);
      v.fetch(into + K::BYTES, 0, 1);
      if (HELD && tile == 0) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
          for (int i = 0; i < ROWS; ++i) Left::read(rows[HELD ? step : 0][i], at_q, first_q, i, step);
      }

      f32 scores[ROWS][KEYS / 8][4];
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (!HELD) {
#pragma unroll
          for (int i = 0; i < ROWS; ++i) Left::read(rows[0][i], at_q, first_q, i, step);
        }
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
          unsigned columns[4];
          Right::read(columns, from, first_k, j, step);
#pragma unroll
          for (int i = 0; i < ROWS; ++i) {
            multiply_add<T>(scores[i][2 * j], rows[HELD ? step : 0][i], columns[0], columns[1]);
            multiply_add<T>(scores[i][2 * j + 1], rows[HELD ? step : 0][i], columns[2], columns[3]);
          }
        }
      }

      const bool edge = (tile + 1) * KEYS > keys || (CAUSAL && (tile + 1) * KEYS > first + 1);
      const f32 factor = PLAIN ? scale : 1.0f;
      f32 fade[ROWS][2];
      bool fades = false;
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = first + (warp * ROWS + i) * 16 + half * 8 + lane / 4;
          f32 highest = top[i][half];
#pragma unroll
          for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = tile * KEYS + j * 8 + lane % 4 * 2 + e;
              f32& score = scores[i][j][half * 2 + e];
              if (!PLAIN)
                score = mask(score * scale, queries % QUERIES ? min(query, queries - 1) : query,
                             keys % KEYS ? min(key, keys - 1) : key);
              if (edge && (key >= keys || (CAUSAL && key > query))) score = -__int_as_float(0x7f800000);
              highest = maximum(highest, score);
            }
          highest = maximum(highest, from_lane(highest, 1));
          highest = maximum(highest, from_lane(highest, 2));
          const bool grows = !((highest - top[i][half]) * factor <= GROWTH);
          fade[i][half] = grows ? power_of_two((top[i][half] - highest) * factor) : 1.0f;
          if (grows) top[i][half] = highest;
          fades |= grows;
        }
      if (__any_sync(0xffffffffu, fades)) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            total[i][half] *= fade[i][half];
#pragma unroll
            for (int j = 0; j < VALUES / 8; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e) sums[i][j][half * 2 + e] *= fade[i][half];
          }
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const f32 below = top[i][half] * factor;
#pragma unroll
          for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              f32& score = scores[i][j][half * 2 + e];
              score = power_of_two(score * factor - below);
              total[i][half] += score;
            }
        }

#pragma unroll
      for (int step = 0; step < KEYS / 16; ++step) {
        unsigned weights[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            const f32* const pair = &scores[i][2 * step + part / 2][part % 2 * 2];
            weights[i][part] = packed<T>(pair[0], pair[1]);
          }
#pragma unroll
        for (int j = 0; j < VALUES / 16; ++j) {
          unsigned columns[4];
          V::read(columns, from + K::BYTES, first_v, j, step);
#pragma unroll
          for (int i = 0; i < ROWS; ++i) {
            multiply_add<T>(sums[i][2 * j], weights[i], columns[0], columns[1]);
            multiply_add<T>(sums[i][2 * j + 1], weights[i], columns[2], columns[3]);
          }
        }
      }
      k.finish(into);
      v.finish(into + K::BYTES);
      commit_copies();
      into = into + STAGE == end ? base : into + STAGE;
      from = from + STAGE == end ? base : from + STAGE;
    }
    await_copies<0>();
    __syncthreads();
    f32* const out = reinterpret_cast<f32*>(shared);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f32 sum = total[i][half];
        sum += from_lane(sum, 1);
        sum += from_lane(sum, 2);
        const f32 share = sum == 0.0f ? 0.0f : 1.0f / sum;  // a query that sees nothing has no result
        const int row = (warp * ROWS + i) * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < VALUES / 8; ++j) {
          Pack<f32, 2> pair = {sums[i][j][half * 2] * share, sums[i][j][half * 2 + 1] * share};
          *reinterpret_cast<Pack<f32, 2>*>(out + row * PITCH + j * 8 + lane % 4 * 2) = pair;
        }
      }
  }
};

// GEMMs on tensor cores: instructions of sm_80 and later, tiles in shared memory, copies under way.

__device__ inline unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// BYTES from global to shared memory, asynchronously; where not `valid`, zeros, and nothing is read. 16, 8 or 4.
template <int BYTES>
__device__ inline void copy_async(unsigned to, const void* from, bool valid) {
  const int read = valid ? BYTES : 0;
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(read));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ inline void store_shared(unsigned to, unsigned bits) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}
template <class T, int N>
__device__ inline void store_pack(unsigned to, const Pack<T, N>& pack) {
  constexpr int WORDS = sizeof(pack) / 4;
  const unsigned* const words = reinterpret_cast<const unsigned*>(&pack);
  if (WORDS == 4)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1 % WORDS]), "r"(words[2 % WORDS]), "r"(words[3 % WORDS]) : "memory");
  else if (WORDS == 2)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1 % WORDS]) : "memory");
  else
    store_shared(to, words[0]);
}

// Four 8 x 8 matrices of 16-bit elements, one row from each address that a lane gives; TRANSPOSED: transposed.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&into)[4], unsigned from) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(from));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(from));
}

// What sums of products of T are kept in.
template <class T>
struct Accumulated {
  using type = f32;
};
template <>
struct Accumulated<i8> {
  using type = i32;
};

// 32-bit floats as tensor cores take them: 10 bits of fraction, to nearest.
__device__ inline unsigned shortened(unsigned bits) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(bits)));
  return y;
}

// One instruction: 16 x 8 sums of as many products as 32 bytes of a row have elements.
template <class T>
__device__ inline void multiply_add(typename Accumulated<T>::type (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ inline void multiply_add<f32>(f32 (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<i8>(i32 (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<f16>(f32 (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<bf16>(f32 (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to one word.
template <class T>
__device__ inline unsigned packed(f32 low, f32 high);
template <>
__device__ inline unsigned packed<f16>(f32 low, f32 high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ inline unsigned packed<bf16>(f32 low, f32 high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A tile of ROWS x COLUMNS elements of SIZE bytes in shared memory, in chunks of 16 bytes. Chunks of neighbouring rows are
// exchanged so that eight rows at one place lie in different banks.
template <int ROWS, int COLUMNS, int SIZE = 2>
struct Tile {
  static constexpr int CHUNKS = COLUMNS * SIZE / 16;
  static constexpr int ROW_BYTES = COLUMNS * SIZE;
  static constexpr int BYTES = ROWS * ROW_BYTES;
  __device__ static unsigned at(int row, int chunk) {
    const int turn = CHUNKS >= 8 ? row & 7 : CHUNKS == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
    return (row * CHUNKS + (chunk ^ turn)) * 16;
  }
  __device__ static unsigned of(int row, int column) { return at(row, column * SIZE / 16) + column * SIZE % 16; }
};

// A tile of OUTER (m or n) x K (k) elements as fragments of 16 x 32 bytes; it is stored with rows of k where TRANSPOSED.
// LEFT is the first operand. OUTER of a warp is a power of two, so that places within it differ in bits of their own.
template <int OUTER, int K, bool TRANSPOSED, bool LEFT, int SIZE = 2>
struct Fragments {
  static_assert(SIZE == 2 || !TRANSPOSED, "only pairs of bytes are transposed on the way");
  using Layout = Tile<TRANSPOSED ? K : OUTER, TRANSPOSED ? OUTER : K, SIZE>;

  // Where this lane reads in the first fragment from `outer` on.
  __device__ static unsigned first(int outer, int lane) {
    const bool by_row = LEFT != TRANSPOSED;
    const int row = by_row ? lane % 16 : lane % 8 + lane / 16 * 8, chunk = by_row ? lane / 16 : lane / 8 % 2;
    return TRANSPOSED ? Layout::at(row, outer / 8 + chunk) : Layout::at(outer + row, chunk);
  }
  // Fragment `number` along OUTER at step `step` along k, from a tile at `base`.
  __device__ static void read(unsigned (&into)[4], unsigned base, unsigned first, int number, int step) {
    const int along = TRANSPOSED ? number : step, across = TRANSPOSED ? step : number;
    load_matrices<TRANSPOSED>(into, base + (first ^ along * 32) + across * 16 * Layout::ROW_BYTES);
    if (SIZE == 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) into[e] = shortened(into[e]);
    }
  }
};

// The same of 32-bit elements with rows of k, which are read one by one.
template <int OUTER, int K, bool LEFT>
struct Fragments<OUTER, K, true, LEFT, 4> {
  using Layout = Tile<K, OUTER, 4>;
  static constexpr int TURN = Layout::CHUNKS >= 8 ? 64 : 32;  // what rows four apart differ by

  __device__ static unsigned first(int outer, int lane) { return Layout::of(lane % 4, outer + lane / 4); }
  __device__ static void read(unsigned (&into)[4], unsigned base, unsigned first, int number, int step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int half = LEFT ? e % 2 : e / 2, later = LEFT ? e / 2 : e % 2;  // of OUTER, of k
      const unsigned at = base + (first ^ half * 32 ^ number * 64 ^ later * TURN) + (step * 8 + later * 4) * Layout::ROW_BYTES;
      unsigned bits;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(at));
      into[e] = shortened(bits);
    }
  }
};

// How a tile of ROWS x COLUMNS elements is divided among threads: chunks of WIDTH neighbours.
template <int ROWS, int COLUMNS, int WIDTH, int THREADS>
struct Chunks {
  static constexpr int PER_ROW = COLUMNS / WIDTH;
  static constexpr int ALL = ROWS * PER_ROW;
  static constexpr int COUNT = (ALL + THREADS - 1) / THREADS;
  static constexpr bool IN_COLUMN = THREADS % PER_ROW == 0;  // all chunks of a thread are in one column
  __device__ static bool exists(int i) { return ALL % THREADS == 0 || i * THREADS + (int)threadIdx.x < ALL; }
  __device__ static int row(int i) {
    return IN_COLUMN ? threadIdx.x / PER_ROW + i * (THREADS / PER_ROW) : (i * THREADS + threadIdx.x) / PER_ROW;
  }
  __device__ static int column(int i) {
    return (IN_COLUMN ? threadIdx.x % PER_ROW : (i * THREADS + threadIdx.x) % PER_ROW) * WIDTH;
  }
  // The chunks of part `part` of `parts` are those from here up to where the next begins.
  __device__ static constexpr int begin(int part, int parts) { return COUNT * part / parts; }
};

// One operand, a matrix in memory: rows of k, or, where TRANSPOSED, rows of m or n, PITCH elements apart. LANES elements
// are copied at once; single ones of two bytes go through registers, in pairs, since no asynchronous copy moves fewer
// than four.
// WHOLE: the tiles cover the matrix exactly along m or n.
template <class T, int OUTER, int K, bool TRANSPOSED, bool LEFT, int LANES, int THREADS, i64 PITCH, bool WHOLE>
struct Matrix : Fragments<OUTER, K, TRANSPOSED, LEFT, sizeof(T)> {
  using Layout = typename Fragments<OUTER, K, TRANSPOSED, LEFT, sizeof(T)>::Layout;
  static constexpr int BYTES = Layout::BYTES;
  static constexpr bool HELD = LANES * sizeof(T) < 4;  // elements go through registers
  static constexpr int WIDTH = HELD ? 2 : LANES;
  using P = Chunks<TRANSPOSED ? K : OUTER, TRANSPOSED ? OUTER : K, WIDTH, THREADS>;
  const T* next;  // where the next tile begins
  int outers, k_count;  // elements from there to the matrix' ends
  unsigned short held[HELD ? P::COUNT : 1][2];

  // The tiles from (outer, k) of a matrix that ends at (outers, k_count).
  __device__ Matrix(const T* from, int outer, int k, int outers, int k_count)
      : next(from + (TRANSPOSED ? k * PITCH + outer : outer * PITCH + k)), outers(outers - outer), k_count(k_count - k) {}

  __device__ bool inside(int outer, int k) const { return (WHOLE || outer < outers) && k < k_count; }

  // A part of the copies for the next tile, to `to`; behind the last tile they are of zeros.
  __device__ void fetch(unsigned to, int part, int parts) {
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) {
      if (i < P::begin(part, parts) || i >= P::begin(part + 1, parts) || !P::exists(i)) continue;
      const int row = P::row(i), column = P::column(i);
      const T* const source = next + row * PITCH + column;
      if constexpr (!HELD) {
        copy_async<WIDTH * sizeof(T)>(to + Layout::of(row, column), source, TRANSPOSED ? inside(column, row) : inside(row, column));
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          held[i][e] = (TRANSPOSED ? inside(column + e, row) : inside(row, column + e)) ? source[e].bits : 0;
      }
    }
  }
  // What is in registers goes to `to`, and the tile after is the next.
  __device__ void finish(unsigned to) {
    if (HELD) {
#pragma unroll
      for (int i = 0; i < P::COUNT; ++i)
        if (P::exists(i)) store_shared(to + Layout::of(P::row(i), P::column(i)), held[i][0] | held[i][1] << 16);
    }
    next += TRANSPOSED ? K * PITCH : K;
    k_count -= K;
  }
};

// The first operand gathered from windows of an image. For a row, `Window` gives its first element's offset (`row`) and
// a mask of the window's positions that are inside the image (`seen`). For an index along k, it gives the distance from
// there (`k_offset`) and the mask of its position (`needed`). LANES neighbours along k are contiguous.
template <class T, int OUTER, int K, int LANES, int THREADS, class Window>
struct Gathered : Fragments<OUTER, K, false, true, sizeof(T)> {
  using Layout = typename Fragments<OUTER, K, false, true, sizeof(T)>::Layout;
  static constexpr int BYTES = Layout::BYTES;
  static constexpr bool HELD = LANES * sizeof(T) < 4;  // elements go through registers
  static constexpr int WIDTH = HELD ? 2 : LANES;
  using P = Chunks<OUTER, K, WIDTH, THREADS>;
  static constexpr int TABLE_BYTES = OUTER * 8;
  struct alignas(8) Row {
    int offset;
    unsigned seen;
  };
  const T* from;
  const Row* table;
  int begin, end;
  unsigned short held[HELD ? P::COUNT : 1][2];

  __device__ Gathered(unsigned char* table, const T* from, int outer, int k, int outers, int k_count)
      : from(from), table(reinterpret_cast<const Row*>(table)), begin(k), end(k_count) {
    for (int row = threadIdx.x; row < OUTER; row += THREADS) {
      const bool exists = outer + row < outers;
      const Row found = {exists ? Window::row(outer + row) : 0, exists ? Window::seen(outer + row) : 0u};
      reinterpret_cast<Row*>(table)[row] = found;
    }
    __syncthreads();
  }

  __device__ void fetch(unsigned to, int part, int parts) {
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) {
      if (i < P::begin(part, parts) || i >= P::begin(part + 1, parts) || !P::exists(i)) continue;
      const int row = P::row(i), column = P::column(i);
      const Row at = table[row];
#pragma unroll
      for (int e = 0; e < (HELD ? 2 : 1); ++e) {
        const int k = begin + column + e;
        const unsigned needed = Window::needed(k);
        const bool inside = k < end && (at.seen & needed) == needed;
        const T* const source = from + (at.offset + Window::k_offset(k));
        if constexpr (!HELD)
          copy_async<WIDTH * sizeof(T)>(to + Layout::of(row, column), source, inside);
        else
          held[i][e] = inside ? source->bits : 0;
      }
    }
  }
  __device__ void finish(unsigned to) {
    if (HELD) {
#pragma unroll
      for (int i = 0; i < P::COUNT; ++i)
        if (P::exists(i)) store_shared(to + Layout::of(P::row(i), P::column(i)), held[i][0] | held[i][1] << 16);
    }
    begin += K;
  }
};

// One operand computed on its way to shared memory. When a tile begins, `Source::read` loads the inputs of LANES
// neighbours; when it ends, they are computed and stored. `read` gets the index of the vector, and returns false if its
// elements are zero.
template <class T, int OUTER, int K, bool TRANSPOSED, bool LEFT, int LANES, int THREADS, class Source>
struct Computed : Fragments<OUTER, K, TRANSPOSED, LEFT, sizeof(T)> {
  using Layout = typename Fragments<OUTER, K, TRANSPOSED, LEFT, sizeof(T)>::Layout;
  static constexpr int BYTES = Layout::BYTES;
  static constexpr bool HELD = true;  // what is read goes through registers
  static constexpr int WIDTH = LANES * sizeof(T) < 4 ? 4 / sizeof(T) : LANES;
  static constexpr int PARTS = WIDTH / LANES;
  using P = Chunks<TRANSPOSED ? K : OUTER, TRANSPOSED ? OUTER : K, WIDTH, THREADS>;
  Source source;
  int outer, k, outers, k_count;
  typename Source::Chunk held[P::COUNT][PARTS];
  bool inside[P::COUNT][PARTS];

  __device__ Computed(const Source& source, int outer, int k, int outers, int k_count)
      : source(source), outer(outer), k(k), outers(outers), k_count(k_count) {}

  __device__ void fetch(unsigned, int part, int parts) {
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) {
      if (i < P::begin(part, parts) || i >= P::begin(part + 1, parts) || !P::exists(i)) continue;
#pragma unroll
      for (int e = 0; e < PARTS; ++e) {
        const int row = P::row(i), column = P::column(i) + e * LANES;
        const int at = outer + (TRANSPOSED ? column : row), at_k = k + (TRANSPOSED ? row : column);
        inside[i][e] = at < outers && at_k < k_count &&
                       source.read(held[i][e], TRANSPOSED ? at / LANES : at, TRANSPOSED ? at_k : at_k / LANES);
      }
    }
  }
  __device__ void finish(unsigned to) {
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) {
      if (!P::exists(i)) continue;
      Pack<T, WIDTH> values = {};
#pragma unroll
      for (int e = 0; e < PARTS; ++e) {
        T value[LANES];
        Source::compute(held[i][e], value);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
          if (inside[i][e]) values.at[e * LANES + lane] = value[lane];
      }
      store_pack(to + Layout::of(P::row(i), P::column(i)), values);
    }
    k += K;
  }
};

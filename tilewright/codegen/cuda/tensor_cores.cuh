// Matrix products on tensor cores: instructions of sm_80 and later, tiles in shared memory, copies under way.

__device__ inline unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// BYTES from global to shared memory, asynchronously, as the first `valid` of them and zeros behind; 16, 8 or 4.
template <int BYTES>
__device__ inline void copy_async(unsigned to, const void* from, int valid) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, one row from each address that a lane gives; TURNED: transposed.
template <bool TURNED>
__device__ inline void load_matrices(unsigned (&into)[4], unsigned from) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(from));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(from));
}

template <class T>
__device__ inline void multiply_add(f32 (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
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

// A tile of ROWS x COLUMNS 16-bit elements in shared memory, in chunks of 16 bytes. Chunks of neighbouring rows are
// exchanged so that eight rows at one place lie in different banks.
template <int ROWS, int COLUMNS>
struct Tile {
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int BYTES = ROWS * COLUMNS * 2;
  __device__ static unsigned at(unsigned base, int row, int chunk) {
    const int turn = CHUNKS >= 8 ? row & 7 : CHUNKS == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
    return base + (row * CHUNKS + (chunk ^ turn)) * 16;
  }
};

// One operand: a matrix in memory whose rows are OUTER (m or n) and columns k, or the other way round where TURNED.
// LANES elements are copied at once; PITCH: elements from one row in memory to the next.
template <class T, int OUTER, int DEPTH, bool TURNED, int LANES, int THREADS>
struct Operand {
  using Layout = Tile<TURNED ? DEPTH : OUTER, TURNED ? OUTER : DEPTH>;
  static constexpr int ROWS = TURNED ? DEPTH : OUTER, COLUMNS = TURNED ? OUTER : DEPTH;
  static constexpr int BYTES = Layout::BYTES;

  // The tile that begins at (row, column) of a matrix of rows x columns elements; what is outside is zero.
  __device__ static void fetch(unsigned base, const T* from, i64 pitch, int row, int column, int rows, int columns) {
    constexpr int PIECES = ROWS * COLUMNS / LANES;
    constexpr int UNROLLED = LANES > 2 ? PIECES : 4;  // single elements are many, and each is a branch
#pragma unroll UNROLLED
    for (int i = 0; i < (PIECES + THREADS - 1) / THREADS; ++i) {
      const int piece = i * THREADS + threadIdx.x;
      if (PIECES % THREADS && piece >= PIECES) break;
      const int r = piece / (COLUMNS / LANES), c = piece % (COLUMNS / LANES) * LANES;
      const bool inside = row + r < rows && column + c < columns;
      const T* source = inside ? from + (row + r) * pitch + column + c : from;
      const unsigned to = Layout::at(base, r, c / 8) + c % 8 * 2;
      if (LANES > 1) {
        copy_async<(LANES > 1 ? LANES : 2) * 2>(to, source, inside ? LANES * 2 : 0);
      } else {
        const unsigned short bits = inside ? source->bits : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(bits));
      }
    }
  }

  // The fragment of 16 (outer) x 16 (k) elements from (outer, k) of the tile on.
  __device__ static void fragment_rows(unsigned (&into)[4], unsigned base, int outer, int k, int lane) {
    if (TURNED)
      load_matrices<true>(into, Layout::at(base, k + lane % 8 + lane / 16 * 8, outer / 8 + lane / 8 % 2));
    else
      load_matrices<false>(into, Layout::at(base, outer + lane % 16, k / 8 + lane / 16));
  }
  // The same for the second operand: two fragments of 8 x 16, registers 0, 1 and 2, 3.
  __device__ static void fragment_columns(unsigned (&into)[4], unsigned base, int outer, int k, int lane) {
    if (TURNED)
      load_matrices<true>(into, Layout::at(base, k + lane % 16, outer / 8 + lane / 16));
    else
      load_matrices<false>(into, Layout::at(base, outer + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2));
  }
};

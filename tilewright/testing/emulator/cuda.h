// What CUDA C++ has beyond C++, and the PTX instructions that kernels use, in terms of the emulated machine. An asm
// statement is a call here: `ptx::` and the instruction's name, its operands in the order of the assembler.
#pragma once

#include <type_traits>

#include "launch.h"

#pragma GCC push_options
#pragma GCC optimize("O2")

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n)
#define __grid_constant__
#define __CUDA_ARCH__ 900

#define threadIdx (emulator::Index{(unsigned)emulator::self().number, 0, 0})
#define blockIdx emulator::block_index()
#define gridDim emulator::grid_size()
#define blockDim (emulator::Index{(unsigned)emulator::machine.threads, 1, 1})
#define __syncthreads emulator::block_barrier
#define __syncwarp() __any_sync(0xffffffffu, 0)

namespace emulator {
inline Index block_index() {
  const unsigned number = machine.first_block + self().block, x = machine.grid_x, y = machine.grid_y;
  if (!x) return {number, 0, 0};
  return {number % x, number / x % y, number / x / y};
}
inline Index grid_size() {
  const unsigned blocks = machine.blocks, x = machine.grid_x, y = machine.grid_y;
  if (!x) return {blocks, 1, 1};
  return {x, y, blocks / x / y};
}
}  // namespace emulator

// Threads are fibers of one: nothing comes in between.
template <class T>
T atomicAdd(T* to, T x) {
  const T old = *to;
  *to = old + x;
  return old;
}
#define ATOMIC(name, T, result)        \
  inline T name(T* to, T x) {          \
    const T old = *to;                 \
    *to = result;                      \
    return old;                        \
  }
#define ATOMIC_OF_EACH(name, result)         \
  ATOMIC(name, int, result)                  \
  ATOMIC(name, unsigned, result)             \
  ATOMIC(name, unsigned long long, result)
ATOMIC_OF_EACH(atomicMax, old > x ? old : x)
ATOMIC_OF_EACH(atomicMin, old < x ? old : x)
ATOMIC(atomicMax, long long, old > x ? old : x)
ATOMIC(atomicMin, long long, old < x ? old : x)
ATOMIC_OF_EACH(atomicAnd, old & x)
ATOMIC_OF_EACH(atomicOr, old | x)
ATOMIC_OF_EACH(atomicXor, old ^ x)
ATOMIC_OF_EACH(atomicExch, x)
ATOMIC(atomicExch, float, x)
template <class T>
T atomicCAS(T* at, T expected, T wanted) {
  static_assert(std::is_unsigned_v<T> || std::is_same_v<T, int>, "the types that CUDA has");
  const T old = *at;
  if (old == expected) *at = wanted;
  return old;
}

inline size_t __cvta_generic_to_shared(const void* at) { return emulator::address_of(at); }

template <class To, class From>
To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  if (mask != 0xffffffffu) emulator::fail("a shuffle of a part of a warp");
  struct Given {
    T x;
    int distance;
  };
  return emulator::together<Given, T>("shfl.xor", Given{x, distance}, [](const Given* given, T* made) {
    for (int lane = 0; lane < emulator::WARP; ++lane) {
      if (given[lane].distance != given[0].distance) emulator::fail("a shuffle over different distances");
      made[lane] = given[lane ^ given[lane].distance].x;
    }
  });
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  if (mask != 0xffffffffu) emulator::fail("a shuffle of a part of a warp");
  struct Given {
    T x;
    int from;
  };
  return emulator::together<Given, T>("shfl.idx", Given{x, from}, [](const Given* given, T* made) {
    for (int lane = 0; lane < emulator::WARP; ++lane) made[lane] = given[given[lane].from].x;
  });
}
inline int __any_sync(unsigned mask, int condition) {
  if (mask != 0xffffffffu) emulator::fail("a vote of a part of a warp");
  return emulator::together<int, int>("vote.any", condition, [](const int* given, int* made) {
    int any = 0;
    for (int lane = 0; lane < emulator::WARP; ++lane) any |= given[lane] != 0;
    for (int lane = 0; lane < emulator::WARP; ++lane) made[lane] = any;
  });
}

// -- numbers ----------------------------------------------------------------------------------------------------------

// The nearest float with so many bits of fraction less, ties to even.
inline unsigned without_low_bits(unsigned bits, int dropped) {
  return bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
}
inline unsigned short to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (unsigned short)(without_low_bits(bits, 16) >> 16);
}
inline float from_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

inline unsigned short to_f16(float x) {
  const unsigned bits = __float_as_uint(x);
  const unsigned short sign = bits >> 16 & 0x8000;
  if (x != x) return 0x7fff;
  const float size = fabsf(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-05f)  // below the normal numbers: in units of the smallest
    return sign | (unsigned short)nearbyintf(size * 16777216.0f);
  return sign | (unsigned short)((without_low_bits(bits & 0x7fffffff, 13) >> 13) - (112 << 10));
}
inline float from_f16(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? __uint_as_float(0x7fffffff) : sign * __uint_as_float(0x7f800000);
  return sign * (exponent ? ldexpf(1024.0f + fraction, exponent - 25) : ldexpf((float)fraction, -24));
}

struct F16 {
  static constexpr int K = 16, IN_REGISTER = 2;
  using Sum = float;
  static float element(unsigned word, int n) { return from_f16((unsigned short)(word >> 16 * n)); }
};
struct BF16 {
  static constexpr int K = 16, IN_REGISTER = 2;
  using Sum = float;
  static float element(unsigned word, int n) { return from_bf16((unsigned short)(word >> 16 * n)); }
};
struct TF32 {  // tensor cores do not read the last 13 bits
  static constexpr int K = 8, IN_REGISTER = 1;
  using Sum = float;
  static float element(unsigned word, int) { return __uint_as_float(word & 0xffffe000); }
};
struct U8 {
  static constexpr int K = 32, IN_REGISTER = 4;
  using Sum = int;
  static int element(unsigned word, int n) { return (unsigned char)(word >> 8 * n); }
};
struct S8 {
  static constexpr int K = 32, IN_REGISTER = 4;
  using Sum = int;
  static int element(unsigned word, int n) { return (signed char)(word >> 8 * n); }
};

// -- instructions -----------------------------------------------------------------------------------------------------

namespace ptx {

// An operand as its constraint says: so many bytes, a float or not.
template <char CONSTRAINT, class T>
constexpr T&& operand(T&& x) {
  using Plain = std::remove_cv_t<std::remove_reference_t<T>>;
  static_assert(CONSTRAINT != 'r' || sizeof(Plain) == 4, "r: 32 bits");
  static_assert(CONSTRAINT != 'h' || sizeof(Plain) == 2, "h: 16 bits");
  static_assert(CONSTRAINT != 'l' || sizeof(Plain) == 8, "l: 64 bits");
  static_assert(CONSTRAINT != 'f' || std::is_same_v<Plain, float>, "f: a float");
  return static_cast<T&&>(x);
}

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void barrier_cluster_arrive_aligned() { emulator::cluster_arrive(); }
inline void barrier_cluster_wait_aligned() { emulator::cluster_wait(); }
inline void barrier_cluster_arrive() { emulator::cluster_arrive(); }
inline void barrier_cluster_wait() { emulator::cluster_wait(); }

inline void ld_global_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from) {
  if ((size_t)from % 16) emulator::fail("a load of 16 bytes is not aligned");
  const unsigned* const words = static_cast<const unsigned*>(from);
  a = words[0], b = words[1], c = words[2], d = words[3];
}

inline void cp_async_cg_shared_global(unsigned to, const void* from, int bytes, int read) {
  if (bytes != 16) emulator::fail("cp.async.cg copies 16 bytes");
  emulator::begin_copy(to, from, bytes, read);
}
inline void cp_async_ca_shared_global(unsigned to, const void* from, int bytes, int read) {
  if (bytes != 4 && bytes != 8 && bytes != 16) emulator::fail("cp.async.ca copies 4, 8 or 16 bytes");
  emulator::begin_copy(to, from, bytes, read);
}
inline void cp_async_commit_group() { emulator::commit_group(); }
inline void cp_async_wait_group(int pending) { emulator::wait_group(pending); }

inline void setmaxnreg_dec_sync_aligned_u32(int count) { emulator::check_registers(count); }
inline void setmaxnreg_inc_sync_aligned_u32(int count) { emulator::check_registers(count); }
inline void bar_sync(int number, int threads) { emulator::named_barrier(number, threads); }

inline void fence_proxy_async_shared__cta() { emulator::fence_async(); }
inline void prefetch_tensormap(const void*) {}
inline void mbarrier_init_shared__cta_b64(unsigned barrier, unsigned arrivals) {
  emulator::begin_barrier(barrier, (int)arrivals);
}
inline void mbarrier_inval_shared__cta_b64(unsigned barrier) { emulator::end_barrier(barrier); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive_expect_tx_shared__cta_b64(unsigned barrier, unsigned bytes) {
  emulator::arrive(barrier, bytes);
}
inline void mbarrier_arrive_shared__cta_b64(unsigned barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_arrive_shared__cluster_b64(unsigned barrier) { emulator::arrive(barrier, 0); }
inline void cluster_rank(unsigned& rank) { rank = (unsigned)emulator::self().block; }
inline void mbarrier_try_wait_parity_shared__cta_b64(unsigned& done, unsigned barrier, unsigned parity) {
  emulator::await_phase(barrier, parity);
  done = 1;
}
template <class Map>
void cp_async_bulk_tensor_2d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(
    unsigned to, const Map* map, int column, int row, unsigned barrier) {
  emulator::BoxCopy copy;
  memcpy(&copy, map, sizeof(copy));
  copy.to = to, copy.column = column, copy.row = row;
  emulator::copy_box(copy, barrier, emulator::self().block);
}
template <class Map>
void cp_async_bulk_tensor_2d_shared__cluster_global_tile_mbarrier__complete_tx__bytes_multicast__cluster(
    unsigned to, const Map* map, int column, int row, unsigned barrier, unsigned short blocks) {
  emulator::BoxCopy copy;
  memcpy(&copy, map, sizeof(copy));
  copy.to = to, copy.column = column, copy.row = row;
  for (int block = 0; block < 16; ++block)
    if (blocks >> block & 1) emulator::copy_box(copy, barrier, block);
}

inline void wgmma_fence_sync_aligned() { emulator::self().registers_fenced = true; }
inline void wgmma_commit_group_sync_aligned() { emulator::commit_multiplications(); }
// The lanes of a warp come out of it together: one that tells others so speaks for all.
inline void wgmma_wait_group_sync_aligned(int pending) {
  emulator::await_multiplications(pending);
  emulator::together<int, int>("wgmma.wait_group", pending, [](const int* given, int* made) {
    for (int lane = 0; lane < emulator::WARP; ++lane) made[lane] = given[lane];
  });
}

struct alignas(8) Two {
  unsigned at[2];
};
struct alignas(16) Four {
  unsigned at[4];
};
struct alignas(16) Floats {
  float at[4];
};
inline void st_shared_u32(unsigned to, unsigned a) { emulator::store(to, a); }
inline void st_shared_v2_u32(unsigned to, unsigned a, unsigned b) { emulator::store(to, Two{{a, b}}); }
inline void st_shared_v4_u32(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  emulator::store(to, Four{{a, b, c, d}});
}
inline void st_shared_u8(unsigned to, unsigned a) { emulator::store(to, (unsigned char)a); }
inline void st_shared_u16(unsigned to, unsigned short a) { emulator::store(to, a); }
inline void ld_shared_u8(unsigned& a, unsigned from) { a = emulator::load<unsigned char>(from); }
inline void ld_shared_u16(unsigned short& a, unsigned from) { a = emulator::load<unsigned short>(from); }
inline void ld_shared_v2_u32(unsigned& a, unsigned& b, unsigned from) {
  const Two found = emulator::load<Two>(from);
  a = found.at[0], b = found.at[1];
}
inline void ld_shared_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  const Four found = emulator::load<Four>(from);
  a = found.at[0], b = found.at[1], c = found.at[2], d = found.at[3];
}
inline void ld_shared_u32(unsigned& a, unsigned from) { a = emulator::load<unsigned>(from); }
inline void mapa_shared__cluster_u32(unsigned& there, unsigned address, unsigned block) {
  there = emulator::in_cluster(address, block);
}
inline void ld_shared__cluster_u32(unsigned& a, unsigned from) { a = emulator::load_in_cluster<unsigned>(from); }
inline void ld_shared__cluster_v4_f32(float& a, float& b, float& c, float& d, unsigned from) {
  const Floats found = emulator::load_in_cluster<Floats>(from);
  a = found.at[0], b = found.at[1], c = found.at[2], d = found.at[3];
}

inline void cvt_f32_f16(float& y, unsigned short x) { y = from_f16(x); }
inline void cvt_rn_f16_f32(unsigned short& y, float x) { y = to_f16(x); }
inline void cvt_rn_bf16_f32(unsigned short& y, float x) { y = to_bf16(x); }
inline void cvt_rn_f16x2_f32(unsigned& y, float high, float low) { y = (unsigned)to_f16(high) << 16 | to_f16(low); }
inline void cvt_rn_bf16x2_f32(unsigned& y, float high, float low) { y = (unsigned)to_bf16(high) << 16 | to_bf16(low); }
inline void cvt_rna_tf32_f32(unsigned& y, float x) {  // ties away from zero
  y = x != x || isinf(x) ? __float_as_uint(x) : (__float_as_uint(x) + 0x1000) & 0xffffe000;
}
inline void ex2_approx_ftz_f32(float& y, float x) {
  const float power = exp2f(x);
  y = power < 1.17549435e-38f ? 0.0f : power;
}
inline void max_NaN_f32(float& y, float a, float b) { y = a != a || b != b ? __uint_as_float(0x7fffffff) : a > b ? a : b; }
inline void min_NaN_f32(float& y, float a, float b) { y = a != a || b != b ? __uint_as_float(0x7fffffff) : a < b ? a : b; }

// COUNT matrices of 8 x 8 pairs of bytes. Lane n gives the address of row n % 8 of matrix n / 8; of each matrix it gets
// two neighbours of row n / 4, or, transposed, of column n / 4.
template <int COUNT, bool TRANSPOSED>
Four ldmatrix(const char* name, unsigned from) {
  return emulator::together<unsigned, Four>(name, from, [](const unsigned* addresses, Four* made) {
    emulator::Block& block = emulator::own_block();
    const int reader = -3 - emulator::self().number / emulator::WARP;
    unsigned short rows[COUNT * 8][8];
    for (int row = 0; row < COUNT * 8; ++row) {
      memcpy(rows[row], emulator::located(block, addresses[row], 16), 16);
      emulator::note_read(block, addresses[row], 16, reader);
    }
    for (int lane = 0; lane < emulator::WARP; ++lane)
      for (int matrix = 0; matrix < COUNT; ++matrix) {
        const int across = lane / 4, along = lane % 4 * 2;
        const unsigned short low = TRANSPOSED ? rows[matrix * 8 + along][across] : rows[matrix * 8 + across][along];
        const unsigned short high = TRANSPOSED ? rows[matrix * 8 + along + 1][across] : rows[matrix * 8 + across][along + 1];
        made[lane].at[matrix] = (unsigned)high << 16 | low;
      }
  });
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  const Four found = ldmatrix<4, false>("ldmatrix.x4", from);
  a = found.at[0], b = found.at[1], c = found.at[2], d = found.at[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  const Four found = ldmatrix<4, true>("ldmatrix.x4.trans", from);
  a = found.at[0], b = found.at[1], c = found.at[2], d = found.at[3];
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned& a, unsigned& b, unsigned from) {
  const Four found = ldmatrix<2, false>("ldmatrix.x2", from);
  a = found.at[0], b = found.at[1];
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned& a, unsigned& b, unsigned from) {
  const Four found = ldmatrix<2, true>("ldmatrix.x2.trans", from);
  a = found.at[0], b = found.at[1];
}

// 16 x 8 sums of K products. A register of the first operand has neighbours along k of row lane / 4, the second those 8
// rows below; the other two, where there are, have those half of k further. Of the second operand they are of column
// lane / 4.
template <class T>
struct Fragments {
  unsigned a[4], b[2];
  typename T::Sum c[4];
};
template <class Sum>
struct Sums {
  Sum at[4];
};
template <class T, int K = T::K>
Sums<typename T::Sum> mma(const char* name, const Fragments<T>& fragments) {
  using Given = Fragments<T>;
  using Made = Sums<typename T::Sum>;
  return emulator::together<Given, Made>(name, fragments, [](const Given* given, Made* made) {
    constexpr int HALF = 4 * T::IN_REGISTER, EACH = T::IN_REGISTER;
    for (int lane = 0; lane < emulator::WARP; ++lane)
      for (int e = 0; e < 4; ++e) {
        const int below = e / 2, column = lane % 4 * 2 + e % 2;
        double total = 0.0;
        for (int k = 0; k < K; ++k) {
          const int later = k / HALF, of = k % HALF / EACH, n = k % EACH;
          const auto left = T::element(given[lane / 4 * 4 + of].a[later * 2 + below], n);
          const auto right = T::element(given[column * 4 + of].b[later], n);
          total += (double)left * (double)right;
        }
        made[lane].at[e] = (typename T::Sum)(total + (double)given[lane].c[e]);
      }
  });
}
#define MMA(NAME, T, SUM)                                                                                            \
  inline void NAME(SUM& d0, SUM& d1, SUM& d2, SUM& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                   unsigned b1, SUM c0, SUM c1, SUM c2, SUM c3) {                                                     \
    const Sums<SUM> d = mma<T>(#NAME, {{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}});                                \
    d0 = d.at[0], d1 = d.at[1], d2 = d.at[2], d3 = d.at[3];                                                           \
  }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, F16, float)
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, BF16, float)
MMA(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, TF32, float)
MMA(mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, S8, int)
MMA(mma_sync_aligned_m16n8k32_row_col_s32_u8_u8_s32, U8, int)
#undef MMA
#define MMA(NAME, T)                                                                                            \
  inline void NAME(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned b0, float c0, \
                   float c1, float c2, float c3) {                                                              \
    const Sums<float> d = mma<T, 8>(#NAME, {{a0, a1, 0, 0}, {b0, 0}, {c0, c1, c2, c3}});                        \
    d0 = d.at[0], d1 = d.at[1], d2 = d.at[2], d3 = d.at[3];                                                     \
  }
MMA(mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32, F16)
MMA(mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32, BF16)
#undef MMA

// 64 x N sums of 16 products by four warps. A thread has rows of its warp's 16 as `mma` has them, and two neighbours of
// every 8 columns. HELD: the first operand is in registers, as `mma` takes it. ACROSS: rows lie across k.
struct Operands {
  unsigned held[4];
  unsigned long long a, b;
  int adds;
};
struct Rows {
  unsigned short at[2][16];
};
inline float of_half(unsigned short bits, const F16*) {
  static float* const table = [] {
    float* const made = new float[65536];
    for (int n = 0; n < 65536; ++n) made[n] = from_f16((unsigned short)n);
    return made;
  }();
  return table[bits];
}
inline float of_half(unsigned short bits, const BF16*) { return from_bf16(bits); }
template <class T, int N, bool HELD, bool A_ACROSS, bool B_ACROSS>
void wgmma(const char* name, float* c, const Operands& given) {
  const Rows rows = emulator::together<Operands, Rows>(name, given, [](const Operands* all, Rows* made) {
    for (int lane = 0; lane < emulator::WARP; ++lane) {
      if (all[lane].b != all[0].b || all[lane].adds != all[0].adds || (!HELD && all[lane].a != all[0].a))
        emulator::fail("the lanes of a warp name different operands");
      for (int below = 0; HELD && below < 2; ++below)
        for (int k = 0; k < 16; ++k)
          made[lane].at[below][k] = all[lane / 4 * 4 + k % 8 / 2].held[k / 8 * 2 + below] >> 16 * (k % 2);
    }
    const int warp = emulator::self().number / emulator::WARP;
    if (!HELD) emulator::Operand(all[0].a, A_ACROSS).note(64, warp);
    emulator::Operand(all[0].b, B_ACROSS).note(N, warp);
  });
  emulator::Multiplication made = {};
  made.c = c, made.a = given.a, made.b = given.b, made.adds = given.adds;
  made.warp = emulator::self().number / emulator::WARP % 4;
  memcpy(made.left, rows.at, sizeof(made.left));
  made.run = [](const emulator::Multiplication& each, float* sums) {
    const T* const type = nullptr;
    const int lane = emulator::self().number % emulator::WARP;
    const emulator::Operand a(HELD ? each.b : each.a, A_ACROSS), b(each.b, B_ACROSS);
    if (lane == 0) {
      if (!HELD) a.note(64, emulator::self().number / emulator::WARP);
      b.note(N, emulator::self().number / emulator::WARP);
    }
    float left[2][16];
    for (int below = 0; below < 2; ++below)
      for (int k = 0; k < 16; ++k)
        left[below][k] =
            of_half(HELD ? each.left[below][k] : a.element(each.warp * 16 + lane / 4 + 8 * below, k), type);
    for (int e = 0; e < N / 4; ++e) {
      const int column = e / 2 * 8 + lane % 4 * 2 + e % 2, at = e / 2 * 4 + e % 2;
      double total[2] = {};
      for (int k = 0; k < 16; ++k) {
        const float right = of_half(b.element(column, k), type);
        for (int below = 0; below < 2; ++below) total[below] += (double)left[below][k] * (double)right;
      }
      for (int below = 0; below < 2; ++below) {
        float& sum = sums[at + 2 * below];
        sum = (float)(total[below] + (each.adds ? (double)sum : 0.0));
      }
    }
  };
  emulator::begin_multiplication(made, N / 2);
}

}  // namespace ptx

#pragma GCC pop_options

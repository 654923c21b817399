// What generated kernels use. No headers: the run-time compiler needs none, and parsing them would take most of its time.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// 16-bit floats are stored, and computed with as f32.
struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};

// The beginning of kernels of few blocks: from sm_90 on, one may be started while the one before it still runs. Memory is
// left alone until that one has ended. Only then may the next come: of two that overlap, none has in its L1 what
// the other writes.
__device__ inline void await_turn() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// 16 bytes that are on their way from here on: no barrier is passed before they are issued.
template <class P>
__device__ inline P issue_load(const P* from) {
  static_assert(sizeof(P) == 16, "one access");
  struct alignas(16) Words {
    unsigned at[4];
  } words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
               : "l"(from)
               : "memory");
  return reinterpret_cast<const P&>(words);
}

__device__ inline f32 wide(f16 x) {
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline f32 wide(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

template <class T>
__device__ inline T narrow(f32 x);
template <>
__device__ inline f16 narrow<f16>(f32 x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ inline bf16 narrow<bf16>(f32 x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Below the normal numbers it is 0.
__device__ inline f32 power_of_two(f32 x) {
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A NaN in either operand is the result.
__device__ inline f32 maximum(f32 a, f32 b) {
  f32 y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline f32 minimum(f32 a, f32 b) {
  f32 y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
template <class T>
__device__ inline T maximum(T a, T b) {
  return a != a ? a : a > b ? a : b;
}
template <class T>
__device__ inline T minimum(T a, T b) {
  return a != a ? a : a < b ? a : b;
}

// Rounded towards minus infinity; by zero: quotient 0, remainder the dividend.
template <class T>
__device__ inline T floor_div(T a, T b) {
  if (b == 0) return 0;
  if (b == T(-1)) return T(0) - a;
  T q = a / b;
  return q - (a % b != 0 && ((a < 0) != (b < 0)));
}
template <class T>
__device__ inline T floor_mod(T a, T b) {
  if (b == 0) return a;
  if (b == T(-1)) return 0;
  T r = a % b;
  return r + (r != 0 && ((r < 0) != (b < 0)) ? b : T(0));
}

__device__ inline i32 dot4(i32 a, i32 b, i32 c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) c += ((a >> 8 * i) & 255) * (i32)(i8)(b >> 8 * i);
  return c;
}

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const { return a + b; }
  __device__ bool operator()(bool a, bool b) const { return a || b; }
};
struct Prod {
  template <class T>
  __device__ T operator()(T a, T b) const { return a * b; }
  __device__ bool operator()(bool a, bool b) const { return a && b; }
};
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const { return maximum(a, b); }
};
struct Min {
  template <class T>
  __device__ T operator()(T a, T b) const { return minimum(a, b); }
};
struct Any {
  __device__ bool operator()(bool a, bool b) const { return a || b; }
};
struct All {
  __device__ bool operator()(bool a, bool b) const { return a && b; }
};

template <class T>
__device__ inline T from_lane(T x, int distance) {
  return __shfl_xor_sync(0xffffffffu, x, distance);
}
template <>
__device__ inline bool from_lane<bool>(bool x, int distance) {
  return __shfl_xor_sync(0xffffffffu, (int)x, distance);
}

// The combination of x over groups of neighbouring threads, in each of them: halves with halves within a warp, then the
// warps in order. Beyond a warp all threads of the block must come here.
template <int GROUP, class Op, class T>
__device__ inline T combined(T x) {
  const Op op;
#pragma unroll
  for (int distance = (GROUP < 32 ? GROUP : 32) / 2; distance > 0; distance /= 2) x = op(x, from_lane(x, distance));
  if (GROUP > 32) {
    __shared__ T of_warp[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    const int first = threadIdx.x / GROUP * (GROUP / 32);
    x = of_warp[first];
#pragma unroll
    for (int warp = 1; warp < GROUP / 32; ++warp) x = op(x, of_warp[first + warp]);
  }
  return x;
}

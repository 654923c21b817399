// What kernels of the tile language use. Shared memory is accessed by address.

__device__ inline unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// N neighbours, 1 to 16 bytes, at a multiple of as many bytes.
template <int N, class T>
__device__ inline void put_shared(unsigned to, const T* from) {
  constexpr int BYTES = sizeof(T) * N;
  Pack<T, N> pack;
#pragma unroll
  for (int n = 0; n < N; ++n) pack.at[n] = from[n];
  if constexpr (BYTES == 1) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"((unsigned)reinterpret_cast<const u8&>(pack)) : "memory");
  } else if constexpr (BYTES == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(reinterpret_cast<const u16&>(pack)) : "memory");
  } else {
    const unsigned* const words = reinterpret_cast<const unsigned*>(&pack);
    if constexpr (BYTES == 4)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(words[0]) : "memory");
    else if constexpr (BYTES == 8)
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1]) : "memory");
    else
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
  }
}
template <int N, class T>
__device__ inline void get_shared(T* into, unsigned from) {
  constexpr int BYTES = sizeof(T) * N;
  Pack<T, N> pack;
  if constexpr (BYTES == 1) {
    unsigned bits;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
    reinterpret_cast<u8&>(pack) = (u8)bits;
  } else if constexpr (BYTES == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(reinterpret_cast<u16&>(pack)) : "r"(from) : "memory");
  } else {
    unsigned* const words = reinterpret_cast<unsigned*>(&pack);
    if constexpr (BYTES == 4)
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from) : "memory");
    else if constexpr (BYTES == 8)
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    else
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
  }
#pragma unroll
  for (int n = 0; n < N; ++n) into[n] = pack.at[n];
}

// BYTES (16, 8 or 4) from global to shared memory, asynchronously; where not `valid`, zeros, and nothing is read.
template <int BYTES>
__device__ inline void copy_async(unsigned to, const void* from, bool valid) {
  const int read = valid ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(read) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// e to the power of x, within 2 + 1.2 |x| units of the last place; 0 below the normal numbers.
__device__ inline f32 exponential(f32 x) { return power_of_two(x * 1.44269504f); }

// N neighbours in global memory.
template <int N, class T>
__device__ inline void get_global(T* into, const T* from) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int n = 0; n < N; ++n) into[n] = pack.at[n];
}
template <int N, class T>
__device__ inline void put_global(T* to, const T* from) {
  Pack<T, N> pack;
#pragma unroll
  for (int n = 0; n < N; ++n) pack.at[n] = from[n];
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// From the lane whose number differs in these bits.
template <class T>
__device__ inline T other_lane(T x, int bits) {
  return __shfl_xor_sync(0xffffffffu, x, bits);
}
template <>
__device__ inline f16 other_lane<f16>(f16 x, int bits) {
  return f16{(u16)__shfl_xor_sync(0xffffffffu, (int)x.bits, bits)};
}
template <>
__device__ inline bf16 other_lane<bf16>(bf16 x, int bits) {
  return bf16{(u16)__shfl_xor_sync(0xffffffffu, (int)x.bits, bits)};
}
template <>
__device__ inline bool other_lane<bool>(bool x, int bits) {
  return __shfl_xor_sync(0xffffffffu, (int)x, bits) != 0;
}
template <>
__device__ inline i8 other_lane<i8>(i8 x, int bits) {
  return (i8)__shfl_xor_sync(0xffffffffu, (int)x, bits);
}
template <>
__device__ inline u8 other_lane<u8>(u8 x, int bits) {
  return (u8)__shfl_xor_sync(0xffffffffu, (int)x, bits);
}
template <>
__device__ inline i16 other_lane<i16>(i16 x, int bits) {
  return (i16)__shfl_xor_sync(0xffffffffu, (int)x, bits);
}
template <>
__device__ inline u16 other_lane<u16>(u16 x, int bits) {
  return (u16)__shfl_xor_sync(0xffffffffu, (int)x, bits);
}

template <class T>
__device__ inline T widest(T x) { return x; }
__device__ inline f32 widest(f16 x) { return wide(x); }
__device__ inline f32 widest(bf16 x) { return wide(x); }

// Ascending order, NaN last.
template <class T>
__device__ inline bool sorts_before(T x, T y) {
  const auto a = widest(x);
  const auto b = widest(y);
  return a < b || (a == a && b != b);
}

// Whether (x, i) is chosen over (y, j): NaN over numbers, then the larger, then the one with the lower index.
template <class T>
__device__ inline bool over_max(T x, int i, T y, int j) {
  const bool nan_x = x != x, nan_y = y != y;
  if (nan_x || nan_y) return nan_x && nan_y ? i < j : nan_x;
  return x > y || (x == y && i < j);
}
template <class T>
__device__ inline bool over_min(T x, int i, T y, int j) {
  const bool nan_x = x != x, nan_y = y != y;
  if (nan_x || nan_y) return nan_x && nan_y ? i < j : nan_x;
  return x < y || (x == y && i < j);
}

__device__ inline f32 add_atomically(f32* to, f32 x) { return atomicAdd(to, x); }
__device__ inline f64 add_atomically(f64* to, f64 x) { return atomicAdd(to, x); }
__device__ inline i32 add_atomically(i32* to, i32 x) { return atomicAdd(to, x); }
__device__ inline u32 add_atomically(u32* to, u32 x) { return atomicAdd(to, x); }
__device__ inline u64 add_atomically(u64* to, u64 x) { return atomicAdd(to, x); }
__device__ inline i64 add_atomically(i64* to, i64 x) { return (i64)atomicAdd((u64*)to, (u64)x); }
template <class T>
__device__ inline T add_half_atomically(T* to, T x) {
  u16 seen = *(volatile u16*)to;
  while (true) {
    const T old = {seen};
    const u16 found = atomicCAS((u16*)to, seen, narrow<T>(wide(old) + wide(x)).bits);
    if (found == seen) return old;
    seen = found;
  }
}
__device__ inline f16 add_atomically(f16* to, f16 x) { return add_half_atomically(to, x); }
__device__ inline bf16 add_atomically(bf16* to, bf16 x) { return add_half_atomically(to, x); }

template <class To, class From>
__device__ inline To with_bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  return reinterpret_cast<const To&>(from);
}

template <class T>
__device__ inline T max_atomically(T* to, T x) { return atomicMax(to, x); }
template <class T>
__device__ inline T min_atomically(T* to, T x) { return atomicMin(to, x); }

// The other steps are of bits: they take the unsigned word of the type's size.
template <int BYTES> struct Word { typedef u32 Type; };
template <> struct Word<8> { typedef u64 Type; };
template <class T>
using WordOf = typename Word<sizeof(T)>::Type;
template <class T>
__device__ inline WordOf<T> word(T x) { return with_bits_of<WordOf<T>>(x); }
template <class T>
__device__ inline T and_atomically(T* to, T x) { return with_bits_of<T>(atomicAnd((WordOf<T>*)to, word(x))); }
template <class T>
__device__ inline T or_atomically(T* to, T x) { return with_bits_of<T>(atomicOr((WordOf<T>*)to, word(x))); }
template <class T>
__device__ inline T xor_atomically(T* to, T x) { return with_bits_of<T>(atomicXor((WordOf<T>*)to, word(x))); }
template <class T>
__device__ inline T xchg_atomically(T* to, T x) { return with_bits_of<T>(atomicExch((WordOf<T>*)to, word(x))); }
template <class T>
__device__ inline T cas_atomically(T* to, T expected, T x) {
  return with_bits_of<T>(atomicCAS((WordOf<T>*)to, word(expected), word(x)));
}

// 32-bit floats as tensor cores take them: 10 bits of fraction, to nearest.
__device__ inline unsigned to_tf32(f32 x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
__device__ inline unsigned shortened(unsigned bits) { return to_tf32(__uint_as_float(bits)); }

// Elements of one register of an instruction.
__device__ inline unsigned in_register(const f16* x) { return (unsigned)x[0].bits | (unsigned)x[1].bits << 16; }
__device__ inline unsigned in_register(const bf16* x) { return (unsigned)x[0].bits | (unsigned)x[1].bits << 16; }
__device__ inline unsigned in_register(const f32* x) { return __float_as_uint(x[0]); }
__device__ inline unsigned in_register(const i8* x) {
  return (unsigned)(u8)x[0] | (unsigned)(u8)x[1] << 8 | (unsigned)(u8)x[2] << 16 | (unsigned)(u8)x[3] << 24;
}
__device__ inline unsigned in_register(const u8* x) {
  return (unsigned)x[0] | (unsigned)x[1] << 8 | (unsigned)x[2] << 16 | (unsigned)x[3] << 24;
}

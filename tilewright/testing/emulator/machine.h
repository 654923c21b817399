// A GPU, emulated for the tests: the threads of a block, or of a cluster of blocks, are fibers of one thread, which run
// in turn until each waits for others. Nothing depends on time: a kernel gives the same result, or the same complaint,
// in every run.
//
// It is stricter than a card. Shared memory holds NaN until it is written; where threads run last to first, it holds
// large numbers instead, so that a maximum that drops NaN gives another result. An asynchronous copy fills its destination
// with NaN when it is issued, and copies only when its thread waits for it. Every word of shared memory that is accessed
// by address remembers who has read and written it since the last barrier: two threads that are not kept apart are
// reported, in whatever order they happened to run. Global memory lies between pages that nobody may touch.
// Multiplications of a warpgroup happen where their threads wait for them: until then the sums are NaN, and what they read
// may not change. What ordinary stores have written they may only read behind a fence of the writing thread. Boxes of the
// tensor copy engine arrive when a thread waits for their barrier, and not before all bytes are announced.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <vector>

// Kernels are compiled quickly, the machine that runs them well.
#pragma GCC push_options
#pragma GCC optimize("O2")

namespace emulator {

constexpr int WARP = 32;
constexpr unsigned POISON = 0xff;      // bytes of it are NaN in every float type
constexpr unsigned LARGE = 0x7b;       // the same, large numbers
constexpr unsigned STATIC_BYTES = 4096;  // for variables that functions declare in shared memory
constexpr unsigned FIRST_ADDRESS = 1024;  // of shared memory: zero is no address
constexpr unsigned BLOCK_SHIFT = 24;     // where an address in the cluster has the number of the block

struct Copy {
  unsigned to;
  const unsigned char* from;
  int bytes, read;
};

// A word of shared memory (or a smaller part: `granule`): who wrote and read it, in which span between barriers.
struct Word {
  int writer = -1, reader = -1;
  unsigned written = 0, read = 0;
  bool flying = false, unfenced = false;
};

// A multiplication of a warpgroup that is under way, to the sums of registers `c`; `run` adds its products.
struct Multiplication {
  float* c;
  unsigned short left[2][16];  // the thread's rows of the first operand, if they are in registers
  unsigned long long a, b;
  int adds, warp;
  void (*run)(const Multiplication&, float* sums);
};

// A box of a matrix on its way to shared memory, rows of up to 128 bytes, swizzled.
struct BoxCopy {
  unsigned to;
  const unsigned char* from;
  long rows, columns, stride;  // of the matrix; bytes between rows
  int box_rows, box_columns, element;
  long row, column;
  int block;  // of the cluster, whose memory it goes to

  int row_bytes() const { return box_columns * element; }
  int bytes() const { return box_rows * row_bytes(); }
};

// A barrier in shared memory. `phases`: that have ended. `expected`: bytes that are to come in this one.
struct BoxBarrier {
  int arrivals, missing;
  long expected = 0;
  unsigned phases = 0;
  int waiting = 0;
  std::vector<BoxCopy> copies;
};

struct Warp {
  unsigned generation = 0;
  int arrived = 0;
  const char* name = nullptr;
  alignas(16) unsigned char given[WARP][64], made[WARP][64];
};

struct Block {
  unsigned char* memory = nullptr;  // the static part, then what the launch gives
  std::vector<Word> words;
  std::vector<Warp> warps;
  unsigned epoch = 1, barrier = 0;
  int arrived = 0, finished = 0;
  std::map<unsigned, BoxBarrier> barriers;  // by address
  int arrived_at[16] = {};                  // named barriers: who waits, and how often each was passed
  unsigned passed[16] = {};
};

struct Thread {
  ucontext_t context;  // to begin with; then, without system calls, `here`
  jmp_buf here;
  unsigned char* stack = nullptr;
  int block = 0, number = 0;
  bool begun = false, done = false;
  const unsigned* watched = nullptr;  // it waits until this is another number
  unsigned seen = 0, cluster_phase = 0;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  std::vector<unsigned> unfenced;  // words that it has written since its last fence
  bool registers_fenced = false;
  std::vector<Multiplication> multiplying;
  std::vector<std::vector<Multiplication>> multiplied;
  std::map<float*, std::vector<float>> sums;  // of registers with multiplications under way, which are NaN
};

struct Index {
  unsigned x, y, z;
};

struct Machine {
  int blocks, threads, cluster, shared_bytes;
  int granule = 4;              // bytes that are accessed by one thread at a time
  int grid_x = 0, grid_y = 1;   // of blocks with three coordinates; 0: with one
  bool descending;  // the order in which threads run
  void (*kernel)(void** arguments);
  void** arguments;
  int first_block = 0;  // of the cluster that runs
  std::vector<Block> members;
  std::vector<Thread> fibers;
  Thread* running = nullptr;
  jmp_buf scheduler;
  unsigned cluster_barrier = 0;
  int cluster_arrived = 0;
};

inline Machine machine;

inline Thread& self() { return *machine.running; }
inline Block& own_block() { return machine.members[self().block]; }

[[noreturn]] inline void fail(const char* what) {
  const Thread* const thread = machine.running;
  if (thread)
    fprintf(stderr, "block %d, thread %d: %s\n", machine.first_block + thread->block, thread->number, what);
  else
    fprintf(stderr, "%s\n", what);
  _exit(3);
}

// -- threads ----------------------------------------------------------------------------------------------------------

inline void wait_until_changed(const unsigned& watched, unsigned seen) {
  Thread& thread = self();
  thread.watched = &watched;
  thread.seen = seen;
  if (!_setjmp(thread.here)) _longjmp(machine.scheduler, 1);
}

inline void block_barrier() {
  Block& block = own_block();
  const unsigned phase = block.barrier;
  if (++block.arrived < machine.threads) return wait_until_changed(block.barrier, phase);
  block.arrived = 0;
  ++block.barrier;
  ++block.epoch;
}

// A barrier of some threads of a block. What these have accessed is ordered then; others do not come between.
inline void named_barrier(int number, int threads) {
  Block& block = own_block();
  if (number < 1 || number > 15 || threads % WARP || threads > machine.threads) fail("a barrier that does not exist");
  const unsigned phase = block.passed[number];
  if (++block.arrived_at[number] < threads) return wait_until_changed(block.passed[number], phase);
  block.arrived_at[number] = 0;
  ++block.passed[number];
  ++block.epoch;
}
inline void check_registers(int count) {
  if (count < 24 || count > 256 || count % 8) fail("a warpgroup asks for registers in a number that there is not");
}

inline void cluster_arrive() {
  self().cluster_phase = machine.cluster_barrier;
  if (++machine.cluster_arrived < machine.threads * machine.cluster) return;
  machine.cluster_arrived = 0;
  ++machine.cluster_barrier;
  for (Block& block : machine.members) ++block.epoch;
}
inline void cluster_wait() {
  if (machine.cluster_barrier == self().cluster_phase) wait_until_changed(machine.cluster_barrier, self().cluster_phase);
}

// All lanes of a warp give something and get something: `compute(given, made)` has both of all lanes.
template <class Given, class Made, class Compute>
Made together(const char* name, const Given& given, Compute compute) {
  static_assert(sizeof(Given) <= 64 && sizeof(Made) <= 64, "room of a lane");
  const int lane = self().number % WARP;
  Warp& warp = own_block().warps[self().number / WARP];
  if (warp.arrived && strcmp(warp.name, name)) fail("the lanes of a warp are at different instructions");
  warp.name = name;
  memcpy(warp.given[lane], &given, sizeof(Given));
  const unsigned generation = warp.generation;
  if (++warp.arrived < WARP) {
    wait_until_changed(warp.generation, generation);
  } else {
    Given all[WARP];
    Made results[WARP];
    for (int n = 0; n < WARP; ++n) memcpy(&all[n], warp.given[n], sizeof(Given));
    compute(all, results);
    for (int n = 0; n < WARP; ++n) memcpy(warp.made[n], &results[n], sizeof(Made));
    warp.arrived = 0;
    ++warp.generation;
  }
  Made made;
  memcpy(&made, warp.made[lane], sizeof(Made));
  return made;
}

// -- shared memory ----------------------------------------------------------------------------------------------------

inline unsigned all_shared_bytes() { return STATIC_BYTES + machine.shared_bytes; }

inline unsigned address_of(const void* at) {
  const unsigned char* const memory = own_block().memory;
  const long offset = static_cast<const unsigned char*>(at) - memory;
  if (offset < 0 || offset > (long)all_shared_bytes()) fail("a pointer that is not to shared memory is taken for one");
  return FIRST_ADDRESS + (unsigned)offset;
}

inline unsigned char* located(Block& block, unsigned address, int bytes) {
  if (address % bytes) fail("an access to shared memory is not aligned");
  if (address < FIRST_ADDRESS || address - FIRST_ADDRESS + bytes > all_shared_bytes())
    fail("an address is outside of shared memory");
  return block.memory + (address - FIRST_ADDRESS);
}

// `thread` reads or writes; a warp that reads together is none of its threads.
inline void note_read(Block& block, unsigned address, int bytes, int thread) {
  for (int n = 0; n < bytes; n += machine.granule) {
    Word& word = block.words[(address - FIRST_ADDRESS + n) / machine.granule];
    if (word.flying) fail("reads what an asynchronous copy has not brought yet");
    if (word.written == block.epoch && word.writer != thread)
      fail("reads what another thread has written since the last barrier");
    word.reader = word.read == block.epoch && word.reader != thread ? -2 : thread;
    word.read = block.epoch;
  }
}
inline void note_unfenced(Word& word, unsigned offset) {
  if (!word.unfenced) self().unfenced.push_back(offset / machine.granule);
  word.unfenced = true;
}
inline void fence_async() {
  for (unsigned number : self().unfenced) own_block().words[number].unfenced = false;
  self().unfenced.clear();
}
inline void note_write(Block& block, unsigned address, int bytes, int thread) {
  for (int n = 0; n < bytes; n += machine.granule) {
    Word& word = block.words[(address - FIRST_ADDRESS + n) / machine.granule];
    if (word.flying) fail("writes where an asynchronous copy is under way");
    if (word.written == block.epoch && word.writer != thread)
      fail("writes what another thread has written since the last barrier");
    if (word.read == block.epoch && word.reader != thread)
      fail("writes what another thread has read since the last barrier");
    word.writer = thread;
    word.written = block.epoch;
    note_unfenced(word, address - FIRST_ADDRESS + n);
  }
}

template <class T>
void store(unsigned address, const T& value) {
  unsigned char* const at = located(own_block(), address, sizeof(T));
  note_write(own_block(), address, sizeof(T), self().number);
  memcpy(at, &value, sizeof(T));
}
template <class T>
T load(unsigned address) {
  const unsigned char* const at = located(own_block(), address, sizeof(T));
  note_read(own_block(), address, sizeof(T), self().number);
  T value;
  memcpy(&value, at, sizeof(T));
  return value;
}

// An address in the shared memory of another block of the cluster.
inline unsigned in_cluster(unsigned address, unsigned block) {
  if (block >= (unsigned)machine.cluster) fail("a block that is not in the cluster");
  return address | (block + 1) << BLOCK_SHIFT;
}
template <class T>
T load_in_cluster(unsigned address) {
  const int number = (int)(address >> BLOCK_SHIFT) - 1;
  Block& block = machine.members[number < 0 ? self().block : number];
  if (block.finished) fail("reads the shared memory of a block of which threads have ended");
  T value;
  memcpy(&value, located(block, address & ((1u << BLOCK_SHIFT) - 1), sizeof(T)), sizeof(T));
  return value;
}

// What a function declares in shared memory lies at the same place in every block; `key` tells variables apart.
inline void* static_shared(const void* key, size_t bytes) {
  static std::vector<const void*> keys;
  static std::vector<unsigned> offsets;
  static unsigned end = 0;
  for (size_t n = 0; n < keys.size(); ++n)
    if (keys[n] == key) return own_block().memory + offsets[n];
  keys.push_back(key);
  offsets.push_back(end);
  end += (bytes + 15) / 16 * 16;
  if (end > STATIC_BYTES) fail("more variables in shared memory than there is room for");
  return own_block().memory + offsets.back();
}
inline unsigned char* dynamic_shared() { return own_block().memory + STATIC_BYTES; }

// -- asynchronous copies ----------------------------------------------------------------------------------------------

inline void begin_copy(unsigned to, const void* from, int bytes, int read) {
  unsigned char* const at = located(own_block(), to, bytes);
  if (read && (size_t)from % bytes) fail("the source of an asynchronous copy is not aligned");
  note_write(own_block(), to, bytes, self().number);
  for (int n = 0; n < bytes; n += machine.granule)
    own_block().words[(to - FIRST_ADDRESS + n) / machine.granule].flying = true;
  memset(at, POISON, bytes);
  self().open.push_back({to, static_cast<const unsigned char*>(from), bytes, read});
}
inline void commit_group() {
  self().groups.push_back(self().open);
  self().open.clear();
}
inline void wait_group(int pending) {
  std::vector<std::vector<Copy>>& groups = self().groups;
  Block& block = own_block();
  while ((int)groups.size() > pending) {
    for (const Copy& copy : groups.front()) {
      unsigned char* const at = located(block, copy.to, copy.bytes);
      memset(at, 0, copy.bytes);
      memcpy(at, copy.from, copy.read);
      for (int n = 0; n < copy.bytes; n += machine.granule) {
        Word& word = block.words[(copy.to - FIRST_ADDRESS + n) / machine.granule];
        word.flying = false;
        word.writer = self().number;
        word.written = block.epoch;
        note_unfenced(word, copy.to - FIRST_ADDRESS + n);
      }
    }
    groups.erase(groups.begin());
  }
}

// -- the tensor copy engine -------------------------------------------------------------------------------------------

// Of an address in the cluster, the block whose memory it is in, and the address there.
inline int block_of(unsigned address) {
  const int number = (int)(address >> BLOCK_SHIFT) - 1;
  return number < 0 ? self().block : number;
}
inline unsigned within_block(unsigned address) { return address & ((1u << BLOCK_SHIFT) - 1); }

inline BoxBarrier& barrier_at(unsigned address) {
  Block& block = machine.members[block_of(address)];
  if (block.finished == machine.threads) fail("a barrier of a block that has ended");
  const auto found = block.barriers.find(within_block(address));
  if (found == block.barriers.end()) fail("there is no barrier here");
  return found->second;
}
inline void begin_barrier(unsigned address, int arrivals) {
  located(own_block(), address, 8);
  if (own_block().barriers.count(address)) fail("a barrier begins where one is");
  BoxBarrier made;
  made.arrivals = made.missing = arrivals;
  own_block().barriers[address] = made;
}
inline void end_barrier(unsigned address) {
  BoxBarrier& barrier = barrier_at(address);
  if (!barrier.copies.empty() || barrier.waiting) fail("a barrier ends that is in use");
  own_block().barriers.erase(address);
}

inline void bring(const BoxCopy& copy) {
  Block& block = machine.members[copy.block];
  const int bits = copy.row_bytes() == 128 ? 3 : copy.row_bytes() == 64 ? 2 : 1;
  for (int row = 0; row < copy.box_rows; ++row)
    for (int byte = 0; byte < copy.row_bytes(); ++byte) {
      unsigned at = copy.to + row * copy.row_bytes() + byte;
      at ^= (at >> 7 & ((1u << bits) - 1)) << 4;
      const long r = copy.row + row, c = copy.column + byte / copy.element;
      const bool inside = r >= 0 && r < copy.rows && c >= 0 && c < copy.columns;
      *located(block, at, 1) = inside ? copy.from[r * copy.stride + copy.column * copy.element + byte] : 0;
      Word& word = block.words[(at - FIRST_ADDRESS) / machine.granule];
      word = Word();
    }
}
// What is announced and on its way arrives.
inline void deliver(BoxBarrier& barrier) {
  long coming = 0;
  for (const BoxCopy& copy : barrier.copies) coming += copy.bytes();
  if (barrier.missing || coming != barrier.expected) return;
  for (const BoxCopy& copy : barrier.copies) bring(copy);
  barrier.copies.clear();
  barrier.expected = 0;
  barrier.missing = barrier.arrivals;
  ++barrier.phases;
}
inline void arrive(unsigned address, long bytes) {
  BoxBarrier& barrier = barrier_at(address);
  if (!barrier.missing) fail("more arrive at a barrier than it has room for");
  barrier.expected += bytes;
  --barrier.missing;
  if (barrier.waiting || (!barrier.expected && barrier.copies.empty())) deliver(barrier);
}
inline void await_phase(unsigned address, unsigned parity) {
  BoxBarrier& barrier = barrier_at(address);
  deliver(barrier);
  while ((barrier.phases & 1) == parity) {
    ++barrier.waiting;
    wait_until_changed(barrier.phases, barrier.phases);
    --barrier.waiting;
  }
}
// `number`: the block of the cluster to which it goes.
inline void copy_box(BoxCopy copy, unsigned address, int number) {
  if (number >= machine.cluster) fail("a block that is not in the cluster");
  Block& block = machine.members[number];
  if (block.finished == machine.threads) fail("a box goes to a block that has ended");
  copy.block = number;
  if ((size_t)copy.from % 16 || copy.stride % 16) fail("a tensor map's address or stride is not a multiple of 16");
  if (copy.to % 128) fail("a box does not begin at a multiple of 128 bytes");
  for (int n = 0; n < copy.bytes(); ++n) *located(block, copy.to + n, 1) = POISON;
  for (int n = 0; n < copy.bytes(); n += machine.granule) {
    Word& word = block.words[(copy.to - FIRST_ADDRESS + n) / machine.granule];
    if (word.flying) fail("a box goes where a copy is under way");
    if (word.unfenced) fail("a box goes where was written without a fence behind it");
    if (word.read == block.epoch && word.reader >= 0) fail("a box goes where a thread has read since the last barrier");
    word.flying = true;
  }
  BoxBarrier& barrier = barrier_at(address | (unsigned)(number + 1) << BLOCK_SHIFT);
  barrier.copies.push_back(copy);
  if (barrier.waiting) deliver(barrier);
}

// A tensor map as the emulator reads it.
template <class Map>
Map tensor_map(const void* from, long rows, long columns, long stride, int box_rows, int box_columns, int element) {
  Map map = {};
  BoxCopy copy = {};
  copy.from = static_cast<const unsigned char*>(from), copy.rows = rows, copy.columns = columns;
  copy.stride = stride * element, copy.box_rows = box_rows, copy.box_columns = box_columns, copy.element = element;
  static_assert(sizeof(copy) <= sizeof(map), "room of a tensor map");
  memcpy(&map, &copy, sizeof(copy));
  return map;
}

// -- multiplications of warpgroups -------------------------------------------------------------------------------------

// An operand in shared memory, as its descriptor says: the address of an element of 2 bytes.
struct Operand {
  unsigned start, leading, stride, row_bytes;
  int swizzle;  // bits
  bool across;  // rows lie across k

  Operand(unsigned long long descriptor, bool across) : across(across) {
    const int mode = (int)(descriptor >> 62);
    if (!mode) fail("an operand that is not swizzled");
    start = (unsigned)(descriptor & 0x3fff) << 4;
    leading = (unsigned)(descriptor >> 16 & 0x3fff) << 4;
    stride = (unsigned)(descriptor >> 32 & 0x3fff) << 4;
    swizzle = 4 - mode, row_bytes = 16u << swizzle;
  }
  unsigned address(int row, int k) const {
    unsigned at = start;
    if (across) {
      const int in_row = row_bytes / 2;
      at += row / in_row * leading + row % in_row * 2 + k / 8 * stride + k % 8 * row_bytes;
    } else {
      at += row / 8 * stride + row % 8 * row_bytes + k * 2;
    }
    return at ^ ((at >> 7 & ((1u << swizzle) - 1)) << 4);
  }
  unsigned short element(int row, int k) const {
    unsigned short bits;
    memcpy(&bits, located(own_block(), address(row, k), 2), 2);
    return bits;
  }
  // A warp of the group reads it: all its rows, 16 of k.
  void note(int rows, int warp) const {
    for (int row = 0; row < rows; row += across ? 8 : 1)
      for (int k = 0; k < 16; k += across ? 1 : 8) {
        const unsigned at = address(row, k);
        Block& block = own_block();
        located(block, at, 16);
        for (int n = 0; n < 16; n += machine.granule)
          if (block.words[(at - FIRST_ADDRESS + n) / machine.granule].unfenced)
            fail("a multiplication reads what was written without a fence behind it");
        note_read(block, at, 16, -100 - warp / 4);
      }
  }
};

inline bool is_multiplying(const float* c) {
  for (const Multiplication& other : self().multiplying)
    if (other.c == c) return true;
  for (const auto& group : self().multiplied)
    for (const Multiplication& other : group)
      if (other.c == c) return true;
  return false;
}
inline void begin_multiplication(const Multiplication& made, int count) {
  Thread& thread = self();
  if (!thread.registers_fenced) fail("a multiplication without a fence before it");
  if (!is_multiplying(made.c)) thread.sums[made.c].assign(made.c, made.c + count);
  memset(made.c, POISON, sizeof(float) * count);
  thread.multiplying.push_back(made);
}
inline void commit_multiplications() {
  self().multiplied.push_back(self().multiplying);
  self().multiplying.clear();
}
inline void await_multiplications(int pending) {
  std::vector<std::vector<Multiplication>>& groups = self().multiplied;
  while ((int)groups.size() > pending) {
    const std::vector<Multiplication> group = groups.front();
    for (const Multiplication& each : group) each.run(each, self().sums[each.c].data());
    groups.erase(groups.begin());
    for (const Multiplication& each : group) {
      const std::vector<float>& sums = self().sums[each.c];
      if (!is_multiplying(each.c)) memcpy(each.c, sums.data(), sizeof(float) * sums.size());
    }
  }
  if (!pending) self().registers_fenced = false;
}

}  // namespace emulator

#pragma GCC pop_options

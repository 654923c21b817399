// Launches of kernels on the emulated machine: the memory that they are given, and their blocks in turn.
#pragma once

#include <sys/resource.h>

#include "machine.h"

#pragma GCC push_options
#pragma GCC optimize("O2")

namespace emulator {

constexpr size_t PAGE = 4096, STACK = 1 << 18;
constexpr rlim_t CPU_SECONDS = 60;  // after which a kernel counts as one that does not end

// Memory that ends with a page that nobody may touch, and begins with one.
inline unsigned char* guarded(size_t bytes, size_t alignment) {
  const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
  unsigned char* const all = static_cast<unsigned char*>(
      mmap(nullptr, whole + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (all == MAP_FAILED) fail("no memory");
  mprotect(all, PAGE, PROT_NONE);
  mprotect(all + PAGE + whole, PAGE, PROT_NONE);
  memset(all + PAGE, POISON, whole);
  return all + PAGE + (whole - (bytes + alignment - 1) / alignment * alignment);
}

inline void thread_body() {
  machine.kernel(machine.arguments);
  if (!self().open.empty() || !self().groups.empty()) fail("ends while an asynchronous copy is under way");
  if (!self().multiplying.empty() || !self().multiplied.empty()) fail("ends while a multiplication is under way");
  self().done = true;
  if (++own_block().finished == machine.threads)
    for (const auto& each : own_block().barriers)
      if (!each.second.copies.empty()) fail("the block ends while a box is on its way");
  _longjmp(machine.scheduler, 1);
}

inline void resume(Thread& thread) {
  machine.running = &thread;
  if (!_setjmp(machine.scheduler)) {
    if (thread.begun) _longjmp(thread.here, 1);
    thread.begun = true;
    setcontext(&thread.context);
  }
  machine.running = nullptr;
}

inline void run_cluster() {
  for (Block& block : machine.members) {
    unsigned char* const memory = block.memory;
    block = Block();
    block.memory = memory ? memory : guarded(all_shared_bytes(), 128);
    memset(block.memory, machine.descending ? LARGE : POISON, all_shared_bytes());
    block.words.resize((all_shared_bytes() + machine.granule - 1) / machine.granule);
    block.warps.resize(machine.threads / WARP);
  }
  machine.cluster_barrier = machine.cluster_arrived = 0;
  for (int n = 0; n < (int)machine.fibers.size(); ++n) {
    Thread& thread = machine.fibers[n];
    unsigned char* const stack = thread.stack ? thread.stack : guarded(STACK, 16);
    thread = Thread();
    thread.stack = stack;
    thread.block = n / machine.threads;
    thread.number = n % machine.threads;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stack;
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, thread_body, 0);
  }
  const int count = (int)machine.fibers.size();
  for (int left = count; left;) {
    bool progress = false;
    for (int n = 0; n < count; ++n) {
      Thread& thread = machine.fibers[machine.descending ? count - 1 - n : n];
      if (thread.done || (thread.watched && *thread.watched == thread.seen)) continue;
      thread.watched = nullptr;
      resume(thread);
      left -= thread.done;
      progress = true;
    }
    if (!progress) fail("deadlock: threads wait for others that have ended or wait elsewhere");
  }
}

inline void run() {
  machine.members.resize(machine.cluster);
  machine.fibers.resize(machine.cluster * machine.threads);
  for (machine.first_block = 0; machine.first_block < machine.blocks; machine.first_block += machine.cluster)
      run_cluster();
}

inline void on_signal(int number) {
  const char* const text = number == SIGSEGV || number == SIGBUS ? "an access outside of memory\n"
                                                                 : "a misaligned access, or an index out of range\n";
  if (write(2, text, strlen(text)) < 0) _exit(5);
  _exit(4);
}

inline void read_all(FILE* file, void* into, size_t bytes) {
  if (fread(into, 1, bytes, file) != bytes) fail("the file of inputs is too short");
}

// `kept`: what is written is given too.
struct Argument {
  size_t bytes;
  bool written, kept = false;
};

// kernel INPUTS RESULTS COUNT ascending|descending: so many launches, with the arguments of each behind each other.
inline int main_of(int argc, char** argv, Machine described, std::vector<Argument> arguments) {
  if (argc != 5) fail("usage: kernel INPUTS RESULTS COUNT ascending|descending");
  static unsigned char stack[1 << 16];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE}) sigaction(number, &action, nullptr);

  rlimit time = {CPU_SECONDS, CPU_SECONDS};
  setrlimit(RLIMIT_CPU, &time);
  machine = described;
  machine.descending = !strcmp(argv[4], "descending");
  FILE* const inputs = fopen(argv[1], "rb");
  FILE* const results = fopen(argv[2], "wb");
  if (!inputs || !results) fail("no such file");
  std::vector<void*> pointers;
  for (const Argument& argument : arguments) pointers.push_back(guarded(argument.bytes, 16));
  machine.arguments = pointers.data();
  for (int left = atoi(argv[3]); left; --left) {
    for (size_t n = 0; n < arguments.size(); ++n) {
      if (arguments[n].written && !arguments[n].kept)
        memset(pointers[n], POISON, arguments[n].bytes);
      else
        read_all(inputs, pointers[n], arguments[n].bytes);
    }
    run();
    for (size_t n = 0; n < arguments.size(); ++n)
      if (arguments[n].written && fwrite(pointers[n], 1, arguments[n].bytes, results) != arguments[n].bytes)
        fail("the results cannot be written");
  }
  fclose(results);
  return 0;
}

}  // namespace emulator

#pragma GCC pop_options

; How a plan runs: one call of tw_run walks its steps, and each step's kernel is spread over threads by a launcher.
;
; This is the only native code of Tilewright that is not generated. It is compiled once per process, by
; runtime/native/__init__.py, which mirrors the struct types below with ctypes (a test compares the layouts) and replaces
; the one placeholder, the processor's instruction for waiting politely in a loop. It calls the outside world only
; through function pointers in these structs, so that no external symbol has to be resolved.
;
; A kernel is `void kernel(uint8_t** arguments, int64_t begin, int64_t end)`.

; Where an argument begins: bases[base] + offset.
%place = type { i64, i64 }                      ; base, offset

; kernel, extent, number of arguments, their places
%step = type { ptr, i64, i64, ptr }

; One call of a model. `times` is null, or gets the nanoseconds of each step; `clock` is clock_gettime.
; steps, bases, launcher, threads, most arguments of any step, times, clock, clock id
%call = type { ptr, ptr, ptr, i64, i64, ptr, ptr, i64 }

; What spreads a kernel over threads. Every launcher begins with its function:
; `void launch(launcher*, kernel, arguments, extent, threads)` with 2 <= threads and 2 <= extent.
%openmp = type { ptr, ptr, ptr }                ; launch, GOMP_parallel, omp_get_thread_num
%pooled = type { ptr, ptr }                     ; launch, pool

%timespec = type { i64, i64 }

declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
@DECLARE_RELAX@

; ---- the plan ------------------------------------------------------------------------------------------------------

; Run the steps [first, last) of a call.
define void @tw_run(ptr %call, i64 %first, i64 %last) {
entry:
  %steps = load ptr, ptr %call
  %bases.at = getelementptr %call, ptr %call, i64 0, i32 1
  %bases = load ptr, ptr %bases.at
  %launcher.at = getelementptr %call, ptr %call, i64 0, i32 2
  %launcher = load ptr, ptr %launcher.at
  %threads.at = getelementptr %call, ptr %call, i64 0, i32 3
  %threads = load i64, ptr %threads.at
  %most.at = getelementptr %call, ptr %call, i64 0, i32 4
  %most = load i64, ptr %most.at
  %times.at = getelementptr %call, ptr %call, i64 0, i32 5
  %times = load ptr, ptr %times.at
  %timed = icmp ne ptr %times, null
  %arguments = alloca ptr, i64 %most, align 16
  %several = icmp ugt i64 %threads, 1
  br label %steps.head

steps.head:
  %index = phi i64 [ %first, %entry ], [ %index.next, %step.done ]
  %more = icmp slt i64 %index, %last
  br i1 %more, label %step.begin, label %finish

step.begin:
  %step = getelementptr %step, ptr %steps, i64 %index
  %kernel = load ptr, ptr %step
  %extent.at = getelementptr %step, ptr %step, i64 0, i32 1
  %extent = load i64, ptr %extent.at
  %count.at = getelementptr %step, ptr %step, i64 0, i32 2
  %count = load i64, ptr %count.at
  %places.at = getelementptr %step, ptr %step, i64 0, i32 3
  %places = load ptr, ptr %places.at
  br label %arguments.head

arguments.head:
  %argument = phi i64 [ 0, %step.begin ], [ %argument.next, %arguments.body ]
  %arguments.more = icmp slt i64 %argument, %count
  br i1 %arguments.more, label %arguments.body, label %launch

arguments.body:
  %place = getelementptr %place, ptr %places, i64 %argument
  %base.index = load i64, ptr %place
  %offset.at = getelementptr %place, ptr %place, i64 0, i32 1
  %offset = load i64, ptr %offset.at
  %base.at = getelementptr ptr, ptr %bases, i64 %base.index
  %base = load ptr, ptr %base.at
  %pointer = getelementptr i8, ptr %base, i64 %offset
  %argument.at = getelementptr ptr, ptr %arguments, i64 %argument
  store ptr %pointer, ptr %argument.at
  %argument.next = add i64 %argument, 1
  br label %arguments.head

launch:
  br i1 %timed, label %time.begin, label %choose

time.begin:
  %began = call i64 @now(ptr %call)
  br label %choose

choose:
  %start = phi i64 [ 0, %launch ], [ %began, %time.begin ]
  %wide = icmp sgt i64 %extent, 1
  %spread = and i1 %wide, %several
  br i1 %spread, label %parallel, label %alone

parallel:
  %launcher.function = load ptr, ptr %launcher
  call void %launcher.function(ptr %launcher, ptr %kernel, ptr %arguments, i64 %extent, i64 %threads)
  br label %step.ran

alone:
  %some = icmp sgt i64 %extent, 0
  br i1 %some, label %serial, label %step.ran

serial:
  call void %kernel(ptr %arguments, i64 0, i64 %extent)
  br label %step.ran

step.ran:
  br i1 %timed, label %time.end, label %step.done

time.end:
  %ended = call i64 @now(ptr %call)
  %elapsed = sub i64 %ended, %start
  %time.at = getelementptr i64, ptr %times, i64 %index
  store i64 %elapsed, ptr %time.at
  br label %step.done

step.done:
  %index.next = add i64 %index, 1
  br label %steps.head

finish:
  ret void
}

define internal i64 @now(ptr %call) {
  %time = alloca %timespec
  %clock.at = getelementptr %call, ptr %call, i64 0, i32 6
  %clock = load ptr, ptr %clock.at
  %id.at = getelementptr %call, ptr %call, i64 0, i32 7
  %id.wide = load i64, ptr %id.at
  %id = trunc i64 %id.wide to i32
  %ignored = call i32 %clock(i32 %id, ptr %time)
  %seconds = load i64, ptr %time
  %nanoseconds.at = getelementptr %timespec, ptr %time, i64 0, i32 1
  %nanoseconds = load i64, ptr %nanoseconds.at
  %scaled = mul i64 %seconds, 1000000000
  %sum = add i64 %scaled, %nanoseconds
  ret i64 %sum
}

; ---- shares of the work ---------------------------------------------------------------------------------------------
;
; The iterations of a step are counted in grains and dealt out in contiguous, equal shares, one for each part. Whoever
; runs a part takes from the front of its share, half of what is left at a time; once it is empty, from the back of
; those of others. So each finds what it wrote in the step before in its own cache, and none waits for a core that is
; slower than the rest. A share is one word, `end << 32 | begin`; it only ever becomes smaller.

define internal i64 @grain(i64 %extent, i64 %parts) {
  %grains = mul i64 %parts, 32
  %size = udiv i64 %extent, %grains
  %grain = call i64 @llvm.umax.i64(i64 %size, i64 1)
  ret i64 %grain
}

; Deal out [0, extent). The shares lie `pitch` bytes apart.
define internal void @deal(ptr %shares, i64 %pitch, i64 %extent, i64 %parts) {
entry:
  %grain = call i64 @grain(i64 %extent, i64 %parts)
  %whole = sub i64 %grain, 1
  %filled = add i64 %extent, %whole
  %count = udiv i64 %filled, %grain
  br label %head

head:
  %index = phi i64 [ 0, %entry ], [ %next, %head ]
  %next = add i64 %index, 1
  %begin.scaled = mul i64 %count, %index
  %begin = udiv i64 %begin.scaled, %parts
  %end.scaled = mul i64 %count, %next
  %end = udiv i64 %end.scaled, %parts
  %end.shifted = shl i64 %end, 32
  %word = or i64 %end.shifted, %begin
  %offset = mul i64 %index, %pitch
  %share = getelementptr i8, ptr %shares, i64 %offset
  store atomic i64 %word, ptr %share monotonic, align 8
  %more = icmp ult i64 %next, %parts
  br i1 %more, label %head, label %done

done:
  ret void
}

; Half of what is left of a share, from the front or from the back; 0 when nothing is.
define internal i64 @take(ptr %share, i1 %front) {
entry:
  %first = load atomic i64, ptr %share monotonic, align 8
  br label %head

head:
  %word = phi i64 [ %first, %entry ], [ %found, %try ]
  %begin = and i64 %word, 4294967295
  %end = lshr i64 %word, 32
  %some = icmp ult i64 %begin, %end
  br i1 %some, label %try, label %none

try:
  %left = sub i64 %end, %begin
  %left.more = add i64 %left, 1
  %half = lshr i64 %left.more, 1
  %from.front = add i64 %begin, %half
  %from.back = sub i64 %end, %half
  %cut = select i1 %front, i64 %from.front, i64 %from.back
  %cut.shifted = shl i64 %cut, 32
  %end.shifted = shl i64 %end, 32
  %before = or i64 %cut.shifted, %begin
  %after = or i64 %end.shifted, %cut
  %taken = select i1 %front, i64 %before, i64 %after
  %rest = select i1 %front, i64 %after, i64 %before
  %exchange = cmpxchg ptr %share, i64 %word, i64 %rest acq_rel monotonic
  %found = extractvalue { i64, i1 } %exchange, 0
  %exchanged = extractvalue { i64, i1 } %exchange, 1
  br i1 %exchanged, label %done, label %head

none:
  ret i64 0

done:
  ret i64 %taken
}

; Run share `index` of `parts`, then what others have left of theirs.
define internal void @run_part(ptr %shares, i64 %pitch, ptr %kernel, ptr %arguments, i64 %extent, i64 %index, i64 %parts) {
entry:
  %grain = call i64 @grain(i64 %extent, i64 %parts)
  br label %share.head

share.head:
  %visited = phi i64 [ 0, %entry ], [ %visited.next, %share.done ]
  %own = icmp eq i64 %visited, 0
  %more = icmp ult i64 %visited, %parts
  br i1 %more, label %share.begin, label %done

share.begin:
  %sum = add i64 %index, %visited
  %which = urem i64 %sum, %parts
  %offset = mul i64 %which, %pitch
  %share = getelementptr i8, ptr %shares, i64 %offset
  br label %take.head

take.head:
  %taken = call i64 @take(ptr %share, i1 %own)
  %some = icmp ne i64 %taken, 0
  br i1 %some, label %run, label %share.done

run:
  %first = and i64 %taken, 4294967295
  %last = lshr i64 %taken, 32
  %begin = mul i64 %first, %grain
  %end.whole = mul i64 %last, %grain
  %end = call i64 @llvm.umin.i64(i64 %end.whole, i64 %extent)
  call void %kernel(ptr %arguments, i64 %begin, i64 %end)
  br label %take.head

share.done:
  %visited.next = add i64 %visited, 1
  br label %share.head

done:
  ret void
}

; ---- OpenMP: a runtime that the process has already loaded --------------------------------------------------------

; kernel, arguments, extent, omp_get_thread_num, parts, shares
%region = type { ptr, ptr, i64, ptr, i64, ptr }

; A share with a cache line of its own.
%share = type { i64, [56 x i8] }

define void @tw_launch_openmp(ptr %launcher, ptr %kernel, ptr %arguments, i64 %extent, i64 %threads) {
  %parallel.at = getelementptr %openmp, ptr %launcher, i64 0, i32 1
  %parallel = load ptr, ptr %parallel.at
  %number.at = getelementptr %openmp, ptr %launcher, i64 0, i32 2
  %number = load ptr, ptr %number.at
  %region = alloca %region
  %shares = alloca %share, i64 %threads, align 64
  call void @deal(ptr %shares, i64 64, i64 %extent, i64 %threads)
  store ptr %kernel, ptr %region
  %arguments.at = getelementptr %region, ptr %region, i64 0, i32 1
  store ptr %arguments, ptr %arguments.at
  %extent.at = getelementptr %region, ptr %region, i64 0, i32 2
  store i64 %extent, ptr %extent.at
  %number.to = getelementptr %region, ptr %region, i64 0, i32 3
  store ptr %number, ptr %number.to
  %parts.at = getelementptr %region, ptr %region, i64 0, i32 4
  store i64 %threads, ptr %parts.at
  %shares.at = getelementptr %region, ptr %region, i64 0, i32 5
  store ptr %shares, ptr %shares.at
  ; Always the same number of threads, whatever the extent: libgomp builds a new team when the number changes.
  %wanted = trunc i64 %threads to i32
  call void %parallel(ptr @openmp_region, ptr %region, i32 %wanted, i32 0)
  ret void
}

; The team may be smaller than what was asked for (nested regions, limits): its members then share out what is left.
define internal void @openmp_region(ptr %region) {
  %kernel = load ptr, ptr %region
  %arguments.at = getelementptr %region, ptr %region, i64 0, i32 1
  %arguments = load ptr, ptr %arguments.at
  %extent.at = getelementptr %region, ptr %region, i64 0, i32 2
  %extent = load i64, ptr %extent.at
  %number.at = getelementptr %region, ptr %region, i64 0, i32 3
  %number = load ptr, ptr %number.at
  %parts.at = getelementptr %region, ptr %region, i64 0, i32 4
  %parts = load i64, ptr %parts.at
  %shares.at = getelementptr %region, ptr %region, i64 0, i32 5
  %shares = load ptr, ptr %shares.at
  %index.narrow = call i32 %number()
  %index = zext i32 %index.narrow to i64
  call void @run_part(ptr %shares, i64 64, ptr %kernel, ptr %arguments, i64 %extent, i64 %index, i64 %parts)
  ret void
}

; ---- the pool: our own threads -------------------------------------------------------------------------------------
;
; A region of parallel work is announced in one word, `generation << 16 | parts`. Part 0 is the caller's. Part k is
; worker k's, who claims it by moving its slot's `claimed` up to the generation; what a worker has not claimed by the
; time the caller is done with its own part, the caller claims and runs itself. So a worker that is asleep, late, or
; was never created costs time but cannot block, and a small kernel does not wait for a sleeping thread to wake.
;
; Why a late worker does no harm: it acts only on a word it has read, and every part of a finished generation is
; claimed, so its claim fails. A successful claim keeps the region open until `pending` is counted down, so the fields
; that it reads afterwards are those of its region.

; Each field that threads spin on has a cache line of its own.
; announced, pending, [ kernel, arguments, extent, owner ], [ seven functions, spins ], ready, region mutex
%pool = type {
  i64, [56 x i8],
  i64, [56 x i8],
  ptr, ptr, i64, i64, [32 x i8],
  ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64,
  i64, [56 x i8],
  [128 x i8]
}

; One per thread; of the caller's only the share is used: [ claimed, share ], [ asleep, thread ], mutex, condition.
%slot = type { i64, i64, [48 x i8], i64, i64, [48 x i8], [128 x i8], [128 x i8] }

; The slots follow the pool in memory.
define internal ptr @slot_at(ptr %pool, i64 %index) {
  %slots = getelementptr %pool, ptr %pool, i64 1
  %slot = getelementptr %slot, ptr %slots, i64 %index
  ret ptr %slot
}

define internal ptr @shares_of(ptr %pool) {
  %slots = call ptr @slot_at(ptr %pool, i64 0)
  %shares = getelementptr %slot, ptr %slots, i64 0, i32 1
  ret ptr %shares
}

define internal i32 @lock(ptr %pool, ptr %mutex) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 9
  %function = load ptr, ptr %function.at
  %result = call i32 %function(ptr %mutex)
  ret i32 %result
}

define internal i32 @try_lock(ptr %pool, ptr %mutex) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 10
  %function = load ptr, ptr %function.at
  %result = call i32 %function(ptr %mutex)
  ret i32 %result
}

define internal i32 @unlock(ptr %pool, ptr %mutex) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 11
  %function = load ptr, ptr %function.at
  %result = call i32 %function(ptr %mutex)
  ret i32 %result
}

define internal i32 @wait(ptr %pool, ptr %condition, ptr %mutex) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 12
  %function = load ptr, ptr %function.at
  %result = call i32 %function(ptr %condition, ptr %mutex)
  ret i32 %result
}

define internal i32 @signal(ptr %pool, ptr %condition) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 13
  %function = load ptr, ptr %function.at
  %result = call i32 %function(ptr %condition)
  ret i32 %result
}

define internal i64 @this_thread(ptr %pool) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 14
  %function = load ptr, ptr %function.at
  %result = call i64 %function()
  ret i64 %result
}

define internal i32 @yield(ptr %pool) {
  %function.at = getelementptr %pool, ptr %pool, i64 0, i32 15
  %function = load ptr, ptr %function.at
  %result = call i32 %function()
  ret i32 %result
}

define internal i64 @spin_limit(ptr %pool) {
  %spins.at = getelementptr %pool, ptr %pool, i64 0, i32 16
  %spins = load i64, ptr %spins.at
  ret i64 %spins
}

; Relax so many times: how Python finds what one costs on this processor (10 to 140 cycles on x86).
define void @tw_relax(i64 %count) {
entry:
  br label %head

head:
  %index = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp ult i64 %index, %count
  br i1 %more, label %body, label %done

body:
  @RELAX@
  %next = add i64 %index, 1
  br label %head

done:
  ret void
}

; Take the part of a slot for a generation; false when someone else has.
define internal i1 @claim(ptr %slot, i64 %generation) {
entry:
  %before = load atomic i64, ptr %slot monotonic, align 8
  %free = icmp ult i64 %before, %generation
  br i1 %free, label %take, label %done

take:
  %exchange = cmpxchg ptr %slot, i64 %before, i64 %generation acq_rel monotonic
  %taken = extractvalue { i64, i1 } %exchange, 1
  br label %done

done:
  %result = phi i1 [ false, %entry ], [ %taken, %take ]
  ret i1 %result
}

; Run a claimed part of the open region, then count it down.
define internal void @run_claimed(ptr %pool, i64 %index, i64 %parts) {
  %kernel.at = getelementptr %pool, ptr %pool, i64 0, i32 4
  %kernel = load ptr, ptr %kernel.at
  %arguments.at = getelementptr %pool, ptr %pool, i64 0, i32 5
  %arguments = load ptr, ptr %arguments.at
  %extent.at = getelementptr %pool, ptr %pool, i64 0, i32 6
  %extent = load i64, ptr %extent.at
  %shares = call ptr @shares_of(ptr %pool)
  call void @run_part(ptr %shares, i64 ptrtoint (ptr getelementptr (%slot, ptr null, i64 1) to i64), ptr %kernel, ptr %arguments, i64 %extent, i64 %index, i64 %parts)
  %pending = getelementptr %pool, ptr %pool, i64 0, i32 2
  %ignored = atomicrmw sub ptr %pending, i64 1 acq_rel
  ret void
}

; Is this thread already inside a region: its caller, or one of the workers?
define internal i1 @inside(ptr %pool) {
entry:
  %self = call i64 @this_thread(ptr %pool)
  %owner.at = getelementptr %pool, ptr %pool, i64 0, i32 7
  %owner = load atomic i64, ptr %owner.at monotonic, align 8
  %mine = icmp eq i64 %owner, %self
  %ready.at = getelementptr %pool, ptr %pool, i64 0, i32 17
  %ready = load atomic i64, ptr %ready.at acquire, align 8
  br i1 %mine, label %yes, label %head

head:
  %index = phi i64 [ 1, %entry ], [ %next, %body ]
  %more = icmp ule i64 %index, %ready
  br i1 %more, label %body, label %no

body:
  %slot = call ptr @slot_at(ptr %pool, i64 %index)
  %thread.at = getelementptr %slot, ptr %slot, i64 0, i32 4
  %thread = load atomic i64, ptr %thread.at monotonic, align 8
  %same = icmp eq i64 %thread, %self
  %next = add i64 %index, 1
  br i1 %same, label %yes, label %head

yes:
  ret i1 true

no:
  ret i1 false
}

define void @tw_launch_pool(ptr %launcher, ptr %kernel, ptr %arguments, i64 %extent, i64 %threads) {
entry:
  %pool.at = getelementptr %pooled, ptr %launcher, i64 0, i32 1
  %pool = load ptr, ptr %pool.at
  %parts = call i64 @llvm.umin.i64(i64 %extent, i64 %threads)
  %mutex = getelementptr %pool, ptr %pool, i64 0, i32 19
  %owner.at = getelementptr %pool, ptr %pool, i64 0, i32 7
  %busy = call i32 @try_lock(ptr %pool, ptr %mutex)
  %taken = icmp eq i32 %busy, 0
  br i1 %taken, label %announce, label %contended

contended:
  ; Another caller's region: wait for its end. One's own, from within a kernel: waiting would be for oneself.
  %nested = call i1 @inside(ptr %pool)
  br i1 %nested, label %alone, label %queue

alone:
  call void %kernel(ptr %arguments, i64 0, i64 %extent)
  ret void

queue:
  %queued = call i32 @lock(ptr %pool, ptr %mutex)
  br label %announce

announce:
  %self = call i64 @this_thread(ptr %pool)
  store atomic i64 %self, ptr %owner.at monotonic, align 8
  %kernel.at = getelementptr %pool, ptr %pool, i64 0, i32 4
  store ptr %kernel, ptr %kernel.at
  %arguments.at = getelementptr %pool, ptr %pool, i64 0, i32 5
  store ptr %arguments, ptr %arguments.at
  %extent.at = getelementptr %pool, ptr %pool, i64 0, i32 6
  store i64 %extent, ptr %extent.at
  %shares = call ptr @shares_of(ptr %pool)
  call void @deal(ptr %shares, i64 ptrtoint (ptr getelementptr (%slot, ptr null, i64 1) to i64), i64 %extent, i64 %parts)
  %pending = getelementptr %pool, ptr %pool, i64 0, i32 2
  store atomic i64 %parts, ptr %pending monotonic, align 8
  %before = load atomic i64, ptr %pool monotonic, align 8
  %generation.before = lshr i64 %before, 16
  %generation = add i64 %generation.before, 1
  %generation.shifted = shl i64 %generation, 16
  %word = or i64 %generation.shifted, %parts
  ; Sequentially consistent here and in the worker's way to sleep: either it sees this word, or we see it asleep.
  store atomic i64 %word, ptr %pool seq_cst, align 8
  br label %wake.head

wake.head:
  %waking = phi i64 [ 1, %announce ], [ %waking.next, %wake.done ]
  %wake.more = icmp ult i64 %waking, %parts
  br i1 %wake.more, label %wake.body, label %own

wake.body:
  %sleeper = call ptr @slot_at(ptr %pool, i64 %waking)
  %asleep.at = getelementptr %slot, ptr %sleeper, i64 0, i32 3
  %asleep = load atomic i64, ptr %asleep.at seq_cst, align 8
  %sleeps = icmp ne i64 %asleep, 0
  br i1 %sleeps, label %wake, label %wake.done

wake:
  %sleeper.mutex = getelementptr %slot, ptr %sleeper, i64 0, i32 6
  %sleeper.condition = getelementptr %slot, ptr %sleeper, i64 0, i32 7
  %wake.locked = call i32 @lock(ptr %pool, ptr %sleeper.mutex)
  %wake.signalled = call i32 @signal(ptr %pool, ptr %sleeper.condition)
  %wake.unlocked = call i32 @unlock(ptr %pool, ptr %sleeper.mutex)
  br label %wake.done

wake.done:
  %waking.next = add i64 %waking, 1
  br label %wake.head

own:
  call void @run_claimed(ptr %pool, i64 0, i64 %parts)
  br label %help.head

help.head:
  %helping = phi i64 [ 1, %own ], [ %helping.next, %help.done ]
  %help.more = icmp ult i64 %helping, %parts
  br i1 %help.more, label %help.body, label %wait.head

help.body:
  %late = call ptr @slot_at(ptr %pool, i64 %helping)
  %help = call i1 @claim(ptr %late, i64 %generation)
  br i1 %help, label %help.run, label %help.done

help.run:
  call void @run_claimed(ptr %pool, i64 %helping, i64 %parts)
  br label %help.done

help.done:
  %helping.next = add i64 %helping, 1
  br label %help.head

wait.head:
  %waited = phi i64 [ 0, %help.head ], [ %waited.next, %wait.relax ], [ %waited, %wait.yield ]
  %open = load atomic i64, ptr %pending acquire, align 8
  %closed = icmp eq i64 %open, 0
  br i1 %closed, label %finish, label %wait.more

wait.more:
  %limit = call i64 @spin_limit(ptr %pool)
  %patient = icmp ult i64 %waited, %limit
  br i1 %patient, label %wait.relax, label %wait.yield

wait.relax:
  @RELAX@
  %waited.next = add i64 %waited, 1
  br label %wait.head

wait.yield:
  ; More threads than free cores: let the one that holds our part run.
  %yielded = call i32 @yield(ptr %pool)
  br label %wait.head

finish:
  store atomic i64 0, ptr %owner.at monotonic, align 8
  %unlocked = call i32 @unlock(ptr %pool, ptr %mutex)
  ret void
}

; The life of worker `index`, a thread that Python made; it never returns. `seen` is the word announced before its birth.
define void @tw_pool_worker(ptr %pool, i64 %index, i64 %seen.first) {
entry:
  %slot = call ptr @slot_at(ptr %pool, i64 %index)
  %asleep.at = getelementptr %slot, ptr %slot, i64 0, i32 3
  %thread.at = getelementptr %slot, ptr %slot, i64 0, i32 4
  %mutex = getelementptr %slot, ptr %slot, i64 0, i32 6
  %condition = getelementptr %slot, ptr %slot, i64 0, i32 7
  %self = call i64 @this_thread(ptr %pool)
  store atomic i64 %self, ptr %thread.at monotonic, align 8
  %ready = getelementptr %pool, ptr %pool, i64 0, i32 17
  %ready.before = atomicrmw add ptr %ready, i64 1 acq_rel
  %limit = call i64 @spin_limit(ptr %pool)
  br label %spin.head

spin.head:
  ; A worker that had no part in the last region does not spin for the next.
  %seen = phi i64 [ %seen.first, %entry ], [ %word, %work ], [ %word, %work.done ], [ %seen, %spin ]
  %budget = phi i64 [ %limit, %entry ], [ 0, %work ], [ %limit, %work.done ], [ %budget.next, %spin ]
  %word.spun = load atomic i64, ptr %pool acquire, align 8
  %fresh = icmp ne i64 %word.spun, %seen
  br i1 %fresh, label %work, label %spin.more

spin.more:
  %patient = icmp ne i64 %budget, 0
  br i1 %patient, label %spin, label %sleep

spin:
  @RELAX@
  %budget.next = sub i64 %budget, 1
  br label %spin.head

sleep:
  %locked = call i32 @lock(ptr %pool, ptr %mutex)
  store atomic i64 1, ptr %asleep.at seq_cst, align 8
  br label %sleep.check

sleep.check:
  %word.slept = load atomic i64, ptr %pool seq_cst, align 8
  %awake = icmp ne i64 %word.slept, %seen
  br i1 %awake, label %sleep.end, label %sleep.wait

sleep.wait:
  %waited = call i32 @wait(ptr %pool, ptr %condition, ptr %mutex)
  br label %sleep.check

sleep.end:
  store atomic i64 0, ptr %asleep.at seq_cst, align 8
  %unlocked = call i32 @unlock(ptr %pool, ptr %mutex)
  br label %work

work:
  %word = phi i64 [ %word.spun, %spin.head ], [ %word.slept, %sleep.end ]
  %parts = and i64 %word, 65535
  %generation = lshr i64 %word, 16
  %takes.part = icmp ult i64 %index, %parts
  br i1 %takes.part, label %work.claim, label %spin.head

work.claim:
  %mine = call i1 @claim(ptr %slot, i64 %generation)
  br i1 %mine, label %work.run, label %work.done

work.run:
  call void @run_claimed(ptr %pool, i64 %index, i64 %parts)
  br label %work.done

work.done:
  br label %spin.head
}

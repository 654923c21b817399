// The reservation station: a ring of operations for each unit. One is issued when those of other units that it depends
// on are complete; a unit's own run in order.
module station import gemmini_types::*; #(
    parameter int LOADS = 8, EXECUTES = 16, STORES = 4
) (
    input  logic clk, reset,
    input  logic valid,
    input  op_t op,
    input  range_t scratchpad, accumulator,  // the rows that it reads or writes
    output logic ready, empty,
    output logic issue_valid [3],
    output op_t issue [3],
    input  logic issue_ready [3],
    input  logic load_done, preload_done, compute_done, store_done
);
  localparam int RING = 32;  // entries in hardware are those of the parameters
  localparam int ALL = 3 * RING;
  op_t ops [3][RING];
  range_t sp [3][RING], acc [3][RING];
  logic held [3][RING];      // in the station and not complete
  logic [ALL-1:0] waits [3][RING];
  logic [4:0] first [3], next [3], tail [3];
  logic [4:0] oldest_load, oldest_store;  // that are not complete: these units finish in order
  logic [5:0] used [3];
  logic [5:0] size [3];
  assign size[LOAD] = 6'(LOADS);
  assign size[EXECUTE] = 6'(EXECUTES);
  assign size[STORE] = 6'(STORES);

  function automatic logic overlap(input range_t x, input range_t y);
    return x.valid && y.valid && x.first < y.last && y.first < x.last;
  endfunction

  logic [ALL-1:0] depends, done_now;
  logic [4:0] oldest_preload, oldest_compute;
  always_comb begin
    oldest_preload = 0;
    oldest_compute = 0;
    for (int back = RING - 1; back >= 0; back--) begin
      if (held[EXECUTE][first[EXECUTE] + 5'(back)] && 6'(back) < used[EXECUTE]) begin
        if (ops[EXECUTE][first[EXECUTE] + 5'(back)].preload) oldest_preload = first[EXECUTE] + 5'(back);
        else oldest_compute = first[EXECUTE] + 5'(back);
      end
    end
    done_now = '0;
    if (load_done) done_now[int'(LOAD) * RING + int'(oldest_load)] = 1;
    if (store_done) done_now[int'(STORE) * RING + int'(oldest_store)] = 1;
    if (preload_done) done_now[int'(EXECUTE) * RING + int'(oldest_preload)] = 1;
    if (compute_done) done_now[int'(EXECUTE) * RING + int'(oldest_compute)] = 1;
    depends = '0;
    for (int u = 0; u < 3; u++)
      for (int e = 0; e < RING; e++)
        if (held[u][e] && 2'(u) != op.unit)
          depends[u * RING + e] = overlap(acc[u][e], accumulator)
              || (overlap(sp[u][e], scratchpad) && (2'(u) == LOAD || op.unit == LOAD));
    depends = depends & ~done_now;
    empty = 1;
    for (int u = 0; u < 3; u++) begin
      if (used[u] != 0) empty = 0;
      issue[u] = ops[u][next[u]];
      issue_valid[u] = next[u] != tail[u] && waits[u][next[u]] == 0;
    end
  end
  assign ready = valid && used[op.unit] < size[op.unit];

  always_ff @(posedge clk) begin
    for (int u = 0; u < 3; u++) begin
      for (int e = 0; e < RING; e++) begin
        waits[u][e] <= waits[u][e] & ~done_now;
        if (done_now[u * RING + e]) held[u][e] <= 0;
      end
      if (issue_valid[u] && issue_ready[u]) next[u] <= next[u] + 1;
      if (used[u] != 0 && !held[u][first[u]]) begin
        first[u] <= first[u] + 1;
      end
      used[u] <= used[u] - 6'(used[u] != 0 && !held[u][first[u]]) + 6'(ready && op.unit == 2'(u));
    end
    if (load_done) oldest_load <= oldest_load + 1;
    if (store_done) oldest_store <= oldest_store + 1;
    if (ready) begin
      ops[op.unit][tail[op.unit]] <= op;
      sp[op.unit][tail[op.unit]] <= scratchpad;
      acc[op.unit][tail[op.unit]] <= accumulator;
      waits[op.unit][tail[op.unit]] <= depends;
      held[op.unit][tail[op.unit]] <= 1;
      tail[op.unit] <= tail[op.unit] + 1;
    end
    if (reset) begin
      oldest_load <= 0;
      oldest_store <= 0;
      for (int u = 0; u < 3; u++) begin
        first[u] <= 0;
        next[u] <= 0;
        tail[u] <= 0;
        used[u] <= 0;
        for (int e = 0; e < RING; e++) begin
          held[u][e] <= 0;
          waits[u][e] <= 0;
        end
      end
    end
  end
endmodule

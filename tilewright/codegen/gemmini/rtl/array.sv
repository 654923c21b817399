// A weight-stationary systolic array. Inputs move right, partial sums and new weights move down, all of them one
// processing element a cycle; row i and column j are delayed so that what belongs together meets. Each element has two
// weights: one that multiplies, one that is being loaded; `sel` says which, and moves down with the sums.
module pe (
    input  logic clk, reset,
    input  logic signed [7:0] in_a, in_d,
    input  logic signed [31:0] in_sum,
    input  logic in_sel, in_load,
    output logic signed [7:0] out_a, out_d,
    output logic signed [31:0] out_sum,
    output logic out_sel, out_load
);
  logic signed [7:0] weight [2];
  always_ff @(posedge clk) begin
    out_a <= in_a;
    out_sum <= in_sum + 32'(in_a) * 32'(weight[in_sel]);
    out_sel <= in_sel;
    out_load <= in_load;
    if (in_load) begin
      weight[~in_sel] <= in_d;
      out_d <= weight[~in_sel];
    end
    if (reset) begin
      weight[0] <= 0;
      weight[1] <= 0;
      out_d <= 0;
      out_load <= 0;
    end
  end
endmodule

module array #(parameter int DIM = 16) (
    input  logic clk, reset,
    input  logic signed [7:0] a [DIM],
    input  logic signed [7:0] d [DIM],
    input  logic sel, load,
    output logic signed [31:0] sums [DIM]  // 2 DIM + 1 cycles behind `a`
);
  logic signed [7:0] a_delay [DIM][DIM], d_delay [DIM][DIM];
  logic signed [31:0] sum_delay [DIM][DIM];
  logic sel_delay [DIM], load_delay [DIM];
  logic signed [7:0] a_wire [DIM][DIM+1], d_wire [DIM+1][DIM];
  logic signed [31:0] sum_wire [DIM+1][DIM];
  logic sel_wire [DIM+1][DIM], load_wire [DIM+1][DIM];

  always_ff @(posedge clk) begin
    for (int lane = 0; lane < DIM; lane++) begin
      a_delay[lane][0] <= a[lane];
      d_delay[lane][0] <= d[lane];
      sum_delay[lane][0] <= sum_wire[DIM][lane];
      for (int at = 1; at < DIM; at++) begin
        a_delay[lane][at] <= a_delay[lane][at-1];
        d_delay[lane][at] <= d_delay[lane][at-1];
        sum_delay[lane][at] <= sum_delay[lane][at-1];
      end
    end
    sel_delay[0] <= sel;
    load_delay[0] <= load && !reset;
    for (int at = 1; at < DIM; at++) begin
      sel_delay[at] <= sel_delay[at-1];
      load_delay[at] <= load_delay[at-1] && !reset;
    end
  end

  for (genvar lane = 0; lane < DIM; lane++) begin : g_edge
    assign a_wire[lane][0] = a_delay[lane][lane];
    assign d_wire[0][lane] = d_delay[lane][lane];
    assign sum_wire[0][lane] = 0;
    assign sel_wire[0][lane] = sel_delay[lane];
    assign load_wire[0][lane] = load_delay[lane];
    assign sums[lane] = sum_delay[lane][DIM-1-lane];
  end
  for (genvar i = 0; i < DIM; i++) begin : g_row
    for (genvar j = 0; j < DIM; j++) begin : g_col
      pe element (
          .clk, .reset,
          .in_a(a_wire[i][j]), .in_d(d_wire[i][j]), .in_sum(sum_wire[i][j]),
          .in_sel(sel_wire[i][j]), .in_load(load_wire[i][j]),
          .out_a(a_wire[i][j+1]), .out_d(d_wire[i+1][j]), .out_sum(sum_wire[i+1][j]),
          .out_sel(sel_wire[i+1][j]), .out_load(load_wire[i+1][j]));
    end
  end
endmodule

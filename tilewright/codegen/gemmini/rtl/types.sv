// Operations as they leave the decoder, with the configuration that holds for them, and the scale's arithmetic.
package gemmini_types;
  typedef enum logic [1:0] {LOAD, EXECUTE, STORE} unit_t;

  typedef struct packed {
    logic        relu;
    logic [3:0]  pool_size, pool_stride;
    logic [1:0]  pool_top, pool_left;
    logic [15:0] pool_pitch;
    logic [7:0]  rows_in, cols_in, rows_out, cols_out;
  } pooling_t;

  typedef struct packed {
    unit_t       unit;
    logic        preload;     // EXECUTE: weights, else a compute
    logic        flip;        // compute: take the weights that were preloaded last
    logic [47:0] dram;
    logic [31:0] local_row;   // LOAD, STORE: the local address; EXECUTE: A or B in the scratchpad
    logic [15:0] rows, cols;
    logic [31:0] stride;      // bytes in DRAM; of a compute: rows between rows of A
    logic [15:0] block_stride;
    logic [31:0] scale;
    logic        shrunk;
    logic [31:0] target;      // compute: C in the accumulator
    pooling_t    pooling;
  } op_t;

  typedef struct packed {
    logic        valid;
    logic [31:0] first, last; // behind the last row
  } range_t;

  typedef struct packed {     // what a beat that was read is for
    logic [31:0] row;         // local address
    logic [15:0] col, count;  // elements
    logic        first;       // of its row: what it does not write becomes 0
    logic        zero;
    logic        shrunk;
    logic [31:0] scale;
    logic        done;        // the last of its instruction
  } beat_t;

  // An integer to a 32-bit float, times a scale in 32-bit floats, to the nearest integer, saturated.
  function automatic logic signed [31:0] scaled(
      input logic signed [31:0] value, input logic [31:0] scale,
      input logic signed [63:0] least, input logic signed [63:0] most);
    logic [63:0] magnitude, mantissa, product, rounded, dropped, half;
    logic signed [63:0] result;
    int lead, exponent, shift;
    magnitude = value < 0 ? 64'(-64'(value)) : 64'(value);
    if (value == 0 || scale[30:0] == 0) return 0;
    lead = 0;
    for (int at = 0; at < 32; at++) if (magnitude[at]) lead = at;
    exponent = lead;
    if (lead <= 23) mantissa = magnitude << (23 - lead);
    else begin
      shift = lead - 23;
      half = 64'd1 << (shift - 1);
      dropped = magnitude & ((64'd1 << shift) - 1);
      mantissa = magnitude >> shift;
      if (dropped > half || (dropped == half && mantissa[0])) mantissa = mantissa + 1;
      if (mantissa[24]) begin mantissa = mantissa >> 1; exponent = exponent + 1; end
    end
    product = mantissa * {40'd0, 1'b1, scale[22:0]};
    exponent = exponent + int'(scale[30:23]) - 127;
    shift = product[47] ? 24 : 23;
    if (product[47]) exponent = exponent + 1;
    half = 64'd1 << (shift - 1);
    dropped = product & ((64'd1 << shift) - 1);
    mantissa = product >> shift;
    if (dropped > half || (dropped == half && mantissa[0])) mantissa = mantissa + 1;
    if (mantissa[24]) begin mantissa = mantissa >> 1; exponent = exponent + 1; end
    if (exponent < -1) return 0;
    if (exponent >= 32) rounded = 64'd1 << 32;
    else if (exponent >= 23) rounded = mantissa << (exponent - 23);
    else begin
      shift = 23 - exponent;
      half = 64'd1 << (shift - 1);
      dropped = mantissa & ((64'd1 << shift) - 1);
      rounded = mantissa >> shift;
      if (dropped > half || (dropped == half && rounded[0])) rounded = rounded + 1;
    end
    result = ((value < 0) != scale[31]) ? -64'(rounded) : 64'(rounded);
    if (result < least) return 32'(least);
    if (result > most) return 32'(most);
    return 32'(result);
  endfunction
endpackage

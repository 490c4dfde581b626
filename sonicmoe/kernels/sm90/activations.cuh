// The gated activations of the FP8 GEMMs: their device code, and the one table that names them.
//
// A gated activation is `value(gate) * up`, or `value(gate) * bounded(up)`. Forward and dgated both
// include this table, and each compiled module exports the names it was built with
// (`activation_names`): a number is a place in that list and is agreed on nowhere else.
//
// Parameters that a layer sets are arguments of a launch, in the order in which their struct names
// them: kernels read them from the constant memory of their arguments.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <string>
#include <string_view>

#include "ptx.cuh"

// X(name of the ActivationType, struct with the formula of the gate)
#define SONICMOE_GATED_ACTIVATIONS(X) \
  X(swiglu, Silu)                     \
  X(geglu, Gelu)                      \
  X(reglu, Relu)                      \
  X(geglu_tanh, GeluTanh)             \
  X(swiglu_oai, Oai)                  \
  X(swiglu_clamp, ClampedSilu)        \
  X(situ_glu, Situ)

namespace sonicmoe::sm90 {

// One struct per gate, each with the same members, which are static where it has no parameters:
//   value(x)   act(x), for forward.
//   both(...)  for backward, of x = code * scale: slope = act'(x), and value = act(x) / scale. The
//              scale is a constant of the row, so the epilogue multiplies by it once per row.
//   kArgument  the epilogue passes argument_scale = kArgument * scale, so that a function of
//              kArgument * x costs one multiplication; 1 where nobody reads it.
//   up_value(u)   what the gate's value is multiplied by, for forward.
//   up_both(...)  that, and its derivative by u, for backward.
// Where bounds are compared with z (kBoundsUp), all of them get z in its own units and a scale of 1.
//
// kParameters names the parameters. A gate that has some has `with(first, second, launch)` too, which
// calls `launch` with an object that holds them, and numbers that follow from them.
//
// kClamps: the gradient ends at `limit`, of gate, and of up on both sides. z is then kept on its side
// of it: where a kept value lay at the bound and z beyond, a gradient would begin that is none.
struct PlainUp {
  static constexpr const char* kParameters = "";
  static constexpr bool kBoundsUp = false, kClamps = false;
  __device__ static __forceinline__ float up_value(float u) { return u; }
  __device__ static __forceinline__ void up_both(float u, float& value, float& slope) {
    value = u;
    slope = 1.f;
  }
};
struct BoundedUp {
  static constexpr bool kBoundsUp = true, kClamps = false;
};

struct Silu : PlainUp {
  static constexpr float kArgument = -1.4426950408889634f;
  __device__ static __forceinline__ float value(float x) {
    return x * reciprocal(1.f + exp2_approx(x * kArgument));
  }
  __device__ static __forceinline__ void both(float code, float scale, float argument_scale,
                                              float& value, float& slope) {
    const float s = reciprocal(1.f + exp2_approx(code * argument_scale));
    value = code * s;
    slope = fmaf(value, fmaf(-s, scale, scale), s);
  }
};
// Exact GELU: the normal distribution by Abramowitz and Stegun 7.1.26, off by less than 8e-8; its
// tail and density share a factor.
struct Gelu : PlainUp {
  static constexpr float kArgument = 1.f;
  __device__ static __forceinline__ float cdf(float x, float& gauss) {
    const float t = reciprocal(fmaf(fabsf(x), 0.23164190f, 1.f));  // 0.3275911 / sqrt(2)
    gauss = exp2_approx(x * x * -0.72134752044448170f);
    float tail = fmaf(t, 0.53070271f, -0.72657601f);  // halves of the published coefficients
    tail = fmaf(t, tail, 0.71070687f);
    tail = fmaf(t, tail, -0.14224837f);
    tail = fmaf(t, tail, 0.12741480f) * t * gauss;
    return x > 0.f ? 1.f - tail : tail;
  }
  __device__ static __forceinline__ float value(float x) {
    float gauss;
    return x * cdf(x, gauss);
  }
  __device__ static __forceinline__ void both(float code, float scale, float, float& value,
                                              float& slope) {
    float gauss;
    const float x = code * scale, c = cdf(x, gauss);
    value = code * c;
    slope = fmaf(x * 0.39894228f, gauss, c);
  }
};
// x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh : PlainUp {
  static constexpr float kArgument = 1.f, kInner = 1.5957691216057308f, kCubic = 0.044715f;
  // The sigmoid, and x^2 up to where it is flat: behind that the cube would overflow.
  __device__ static __forceinline__ float sigmoid(float x, float& square) {
    constexpr float kLinear = -kInner * 1.4426950408889634f;
    square = fminf(x * x, 1e4f);
    return reciprocal(1.f + exp2_approx(x * fmaf(square, kCubic * kLinear, kLinear)));
  }
  __device__ static __forceinline__ float value(float x) {
    float square;
    return x * sigmoid(x, square);
  }
  __device__ static __forceinline__ void both(float code, float scale, float, float& value,
                                              float& slope) {
    float square;
    const float x = code * scale, s = sigmoid(x, square);
    value = code * s;
    slope = fmaf(fmaf(-s, s, s) * x, fmaf(square, 3.f * kCubic * kInner, kInner), s);
  }
};
struct Relu : PlainUp {
  static constexpr float kArgument = 1.f;
  __device__ static __forceinline__ float value(float x) {
    return x > 0.f ? x : x * 0.f;
  }  // x * 0 keeps NaN
  __device__ static __forceinline__ void both(float code, float, float, float& value,
                                              float& slope) {
    // z in bf16 may be NaN, which stays. The addition makes +0 of -0.
    const float nothing = fmaf(code, 0.f, 0.f);
    value = code > 0.f ? code : nothing;
    slope = code > 0.f ? 1.f : nothing;
  }
};

// silu(min(gate, limit)) and clamp(up, -limit, limit). A bound passes the gradient; beyond it there
// is none. Comparisons with a NaN are false, so it stays.
struct ClampedSilu : BoundedUp {
  static constexpr const char* kParameters = "limit";
  static constexpr bool kClamps = true;
  static constexpr float kArgument = Silu::kArgument;
  float limit;
  __device__ __forceinline__ float value(float x) const { return Silu::value(at_most(x, limit)); }
  __device__ __forceinline__ void both(float x, float, float, float& value, float& slope) const {
    const float g = at_most(x, limit);
    const float s = reciprocal(1.f + exp2_approx(g * kArgument));
    value = g * s;
    slope = x > limit ? 0.f : fmaf(value, 1.f - s, s);
  }
  __device__ __forceinline__ float up_value(float u) const {
    return at_least(at_most(u, limit), -limit);
  }
  __device__ __forceinline__ void up_both(float u, float& value, float& slope) const {
    value = up_value(u);
    slope = fabsf(u) > limit ? 0.f : 1.f;
  }
  template <class Launch>
  static void with(double limit, double, Launch launch) {
    launch(ClampedSilu{{}, static_cast<float>(limit)});
  }
};

// GPT-OSS's gate: g * sigmoid(alpha * g) with g = min(gate, limit), times clamp(up, -limit, limit) + 1.
struct Oai : BoundedUp {
  static constexpr const char* kParameters = "alpha limit";
  static constexpr bool kClamps = true;
  static constexpr float kArgument = Silu::kArgument;
  float alpha, argument, limit;  // argument: alpha * kArgument
  __device__ __forceinline__ float value(float x) const {
    const float g = at_most(x, limit);
    return g * reciprocal(1.f + exp2_approx(g * argument));
  }
  __device__ __forceinline__ void both(float x, float, float, float& value, float& slope) const {
    const float g = at_most(x, limit);
    const float s = reciprocal(1.f + exp2_approx(g * argument));
    value = g * s;
    slope = x > limit ? 0.f : fmaf(alpha, fmaf(-value, s, value), s);
  }
  __device__ __forceinline__ float up_value(float u) const {
    return at_least(at_most(u, limit), -limit) + 1.f;
  }
  __device__ __forceinline__ void up_both(float u, float& value, float& slope) const {
    value = up_value(u);
    slope = fabsf(u) > limit ? 0.f : 1.f;
  }
  template <class Launch>
  static void with(double alpha, double limit, Launch launch) {
    const float a = static_cast<float>(alpha);
    launch(Oai{{}, a, a * kArgument, static_cast<float>(limit)});
  }
};

// max(x, 0)^2, which has no gate.
struct SquaredRelu {
  static constexpr const char* kParameters = "";
  static constexpr float kArgument = 1.f;
  __device__ static __forceinline__ float value(float x) { return x > 0.f ? x * x : x * 0.f; }
  __device__ static __forceinline__ void both(float x, float, float, float& value, float& slope) {
    value = SquaredRelu::value(x);
    slope = x > 0.f ? 2.f * x : x * 0.f;
  }
};

// bound * tanh(x / bound) and its derivative, which both follow from r = 1 / (1 + exp(2 |x| /
// bound)): tanh is 1 - 2 r, and its derivative 4 r (1 - r) keeps its digits where tanh is flat.
// Below a quarter of the bound 1 - 2 r would lose digits, and a polynomial takes over. Off by less
// than 2^-19 of the value: e4m3 rounds at 2^-4, and `tanh.approx`, off by 2^-11, would make the
// derivative of a flat tanh all error.
struct Softcap {
  float bound, argument, inverse, quarter;  // argument: 2 log2(e) / bound
  explicit Softcap(double to)
      : bound(static_cast<float>(to)),
        argument(2.8853900817779268f / bound),
        inverse(1.f / bound),
        quarter(0.25f * bound) {}
  __device__ __forceinline__ float both(float x, float& slope) const {
    const float r = reciprocal(1.f + exp2_approx(fabsf(x) * argument));
    const float s = x * inverse, square = s * s;
    // tanh(s) / s to the sixth power of s; the next term is 62/2835 s^8.
    const float near = x * fmaf(square, fmaf(square, fmaf(square, -17.f / 315.f, 2.f / 15.f), -1.f / 3.f), 1.f);
    const float far = copysignf(bound * fmaf(-2.f, r, 1.f), x);
    slope = fmaf(-4.f * r, r, 4.f * r);
    return fabsf(x) < quarter ? near : far;
  }
};

// softcap(gate, beta) * sigmoid(gate), times up.
struct SoftcappedGate : BoundedUp {
  static constexpr float kArgument = Silu::kArgument;
  Softcap gate_cap;
  explicit SoftcappedGate(double beta) : gate_cap(beta) {}
  __device__ __forceinline__ float value(float x) const {
    float slope;
    return gate_cap.both(x, slope) * reciprocal(1.f + exp2_approx(x * kArgument));
  }
  __device__ __forceinline__ void both(float x, float, float, float& value, float& slope) const {
    float cap_slope;
    const float cap = gate_cap.both(x, cap_slope);
    const float s = reciprocal(1.f + exp2_approx(x * kArgument));
    value = cap * s;
    slope = fmaf(value, 1.f - s, cap_slope * s);
  }
  __device__ static __forceinline__ float up_value(float u) { return u; }
  __device__ static __forceinline__ void up_both(float u, float& value, float& slope) {
    value = u;
    slope = 1.f;
  }
};
// The same times softcap(up, linear_beta).
struct SoftcappedBoth : SoftcappedGate {
  Softcap up_cap;
  SoftcappedBoth(double beta, double linear_beta) : SoftcappedGate(beta), up_cap(linear_beta) {}
  __device__ __forceinline__ float up_value(float u) const {
    float slope;
    return up_cap.both(u, slope);
  }
  __device__ __forceinline__ void up_both(float u, float& value, float& slope) const {
    value = up_cap.both(u, slope);
  }
};
// An infinite linear_beta caps nothing, and costs nothing.
struct Situ {
  static constexpr const char* kParameters = "beta linear_beta";
  template <class Launch>
  static void with(double beta, double linear_beta, Launch launch) {
    linear_beta < __builtin_huge_val() ? launch(SoftcappedBoth(beta, linear_beta))
                                       : launch(SoftcappedGate(beta));
  }
};

}  // namespace sonicmoe::sm90

namespace sonicmoe {

// Whether this module is compiled for an activation of the table: a model needs one, and compiling
// all of them takes twice as long. Without ACTIVATION a module has the whole table.
constexpr bool is_compiled([[maybe_unused]] std::string_view name) {
#ifdef ACTIVATION
#define SONICMOE_TEXT(name) #name
#define SONICMOE_VALUE(name) SONICMOE_TEXT(name)
  return name == SONICMOE_VALUE(ACTIVATION);
#undef SONICMOE_VALUE
#undef SONICMOE_TEXT
#else
  return true;
#endif
}

// What is compiled, in the order of the table: a name and, behind it, those of its parameters.
inline tvm::ffi::Array<tvm::ffi::String> activation_names() {
  tvm::ffi::Array<tvm::ffi::String> names;
#define SONICMOE_NAME(name, Gate) \
  if (is_compiled(#name)) names.push_back(std::string(#name " ") + sm90::Gate::kParameters);
  SONICMOE_GATED_ACTIVATIONS(SONICMOE_NAME)
#undef SONICMOE_NAME
  return names;
}

inline void check_activation(int64_t number) {
#define SONICMOE_COUNT(name, Gate) +is_compiled(#name)
#define SONICMOE_LIST(name, Gate) << (is_compiled(#name) ? " " #name : "")
  constexpr int64_t kCount = 0 SONICMOE_GATED_ACTIVATIONS(SONICMOE_COUNT);
  TVM_FFI_ICHECK(number >= 0 && number < kCount)
      << "activation is " << number
      << "; needed: a place in the list" SONICMOE_GATED_ACTIVATIONS(SONICMOE_LIST);
#undef SONICMOE_LIST
#undef SONICMOE_COUNT
}

// Calls `launch` with an object of this struct that holds these parameters, as far as it has any.
template <class Gate, class Launch>
void with_parameters(double first, double second, Launch launch) {
  if constexpr (*Gate::kParameters == 0) {
    launch(Gate{});
  } else {
    Gate::with(first, second, launch);
  }
}

// The same for the struct at this place of `activation_names()`. What is not compiled is discarded
// here, before any kernel of it is instantiated.
template <class Launch>
void with_activation(int64_t number, double first, double second, Launch launch) {
  int64_t place = 0;
#define SONICMOE_LAUNCH(name, Gate) \
  if constexpr (is_compiled(#name)) \
    if (number == place++) return with_parameters<sm90::Gate>(first, second, launch);
  SONICMOE_GATED_ACTIVATIONS(SONICMOE_LAUNCH)
#undef SONICMOE_LAUNCH
}

}  // namespace sonicmoe

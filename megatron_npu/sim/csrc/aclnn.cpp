// The aclnn interface: descriptions of tensors and scalars, and the one kernel that torch_npu's C++ calls past
// the dispatcher (ConstantPadNd, in all_gather of a list). All other computation is in compute.cpp. No other
// aclnn function may exist here: torch_npu asks for them by name, and one that is there but computes nothing
// would be a silently wrong result.
#include <cstring>
#include <vector>

#include "codes.h"
#include "half.h"
#include "runtime.h"

// Opaque to torch_npu, which only passes pointers on.
struct aclTensor {
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // in elements
  int type;
  char* memory;
};
struct aclScalar {
  char value[16];
  int type;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<char> values;
};
struct aclTensorList {
  std::vector<aclTensor*> tensors;
};
struct aclOpExecutor {
  sim::Task task;
};

namespace sim {
namespace {

// aclDataType in acl/acl_base.h
enum Type { kFloat = 0, kHalf = 1, kInt8 = 2, kInt32 = 3, kUInt8 = 4, kInt16 = 6, kUInt16 = 7, kUInt32 = 8, kInt64 = 9,
            kUInt64 = 10, kDouble = 11, kBool = 12, kComplex64 = 16, kComplex128 = 17, kBFloat16 = 27 };

// Bytes of one element; 0 for types that are not simulated (4-bit, 8-bit floating point).
size_t element_size(int type) {
  switch (type) {
    case kInt8: case kUInt8: case kBool: return 1;
    case kHalf: case kBFloat16: case kInt16: case kUInt16: return 2;
    case kFloat: case kInt32: case kUInt32: return 4;
    case kInt64: case kUInt64: case kDouble: case kComplex64: return 8;
    case kComplex128: return 16;
    default: return 0;
  }
}

template <typename T>
double read_as(const char* memory) {
  T value;
  std::memcpy(&value, memory, sizeof value);
  return static_cast<double>(value);
}

double number(const aclScalar& scalar) {
  switch (scalar.type) {
    case kFloat: return read_as<float>(scalar.value);
    case kInt32: return read_as<int32_t>(scalar.value);
    case kInt64: return read_as<int64_t>(scalar.value);
    case kBool: return scalar.value[0] != 0;
    default: return read_as<double>(scalar.value);  // torch_npu makes the others double
  }
}

template <typename T>
void write_as(char* memory, double value) {
  T converted = static_cast<T>(value);
  std::memcpy(memory, &converted, sizeof converted);
}

void write_bits(char* memory, uint16_t bits) { std::memcpy(memory, &bits, sizeof bits); }

void write(char* memory, int type, double value) {
  std::memset(memory, 0, element_size(type));
  switch (type) {
    case kFloat: case kComplex64: return write_as<float>(memory, value);
    case kDouble: case kComplex128: return write_as<double>(memory, value);
    case kHalf: return write_bits(memory, Half::store(static_cast<float>(value)));
    case kBFloat16: return write_bits(memory, BFloat16::store(static_cast<float>(value)));
    case kInt16: return write_as<int16_t>(memory, value);
    case kInt32: return write_as<int32_t>(memory, value);
    case kInt64: return write_as<int64_t>(memory, value);
    default: memory[0] = static_cast<char>(static_cast<int64_t>(value));  // char has no sign on every machine
  }
}

// `out` (contiguous) takes `self` (any strides) with `padding` around it: two numbers, before and after, per
// dimension from the last one on, as in torch.nn.functional.pad.
void pad(const aclTensor& self, const std::vector<int64_t>& padding, double value, const aclTensor& out) {
  const size_t bytes = element_size(out.type), dimensions = out.sizes.size();
  size_t elements = 1;
  for (int64_t size : out.sizes) elements *= size;
  std::vector<char> filling(bytes);
  write(filling.data(), out.type, value);
  char* target = out.memory + out.offset * bytes;
  for (size_t i = 0; i < elements; ++i, target += bytes) {
    size_t rest = i;
    int64_t source = self.offset;
    bool inside = true;
    for (size_t k = 0; k < dimensions && inside; ++k) {
      size_t d = dimensions - 1 - k;
      int64_t index = rest % out.sizes[d];
      rest /= out.sizes[d];
      if (2 * k < padding.size()) index -= padding[2 * k];
      inside = index >= 0 && index < self.sizes[d];
      source += index * self.strides[d];
    }
    std::memcpy(target, inside ? self.memory + source * bytes : filling.data(), bytes);
  }
}

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, int type, const int64_t* strides,
                                   int64_t offset, int /*format*/, const int64_t* /*storage_sizes*/,
                                   uint64_t /*storage_dimensions*/, void* memory) {
  auto* tensor = new aclTensor{{sizes, sizes + dimensions}, {}, offset, type, static_cast<char*>(memory)};
  if (strides) tensor->strides.assign(strides, strides + dimensions);
  return tensor;
}
SIM_API aclScalar* aclCreateScalar(void* value, int type) {
  auto* scalar = new aclScalar{{}, type};
  std::memcpy(scalar->value, value, element_size(type));
  return scalar;
}
SIM_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
SIM_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{{values, values + count}};
}
SIM_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
SIM_API aclTensorList* aclCreateTensorList(aclTensor* const* tensors, uint64_t count) {
  return new aclTensorList{{tensors, tensors + count}};
}

#define SIM_DESTROY(kind)                       \
  SIM_API int aclDestroy##kind(acl##kind* it) { \
    delete it;                                  \
    return kOk;                                 \
  }
SIM_DESTROY(Tensor)
SIM_DESTROY(Scalar)
SIM_DESTROY(IntArray)
SIM_DESTROY(BoolArray)
SIM_DESTROY(FloatArray)
// A list owns its tensors.
SIM_API int aclDestroyTensorList(aclTensorList* list) {
  for (aclTensor* tensor : list->tensors) delete tensor;
  delete list;
  return kOk;
}

// Every aclnn kernel comes in two steps: this one checks, says how much scratch memory it needs and makes an
// executor; the second runs it on a stream. torch_npu may destroy the descriptions in between.
SIM_API int aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* padding,
                                               const aclScalar* value, aclTensor* out, uint64_t* workspace,
                                               aclOpExecutor** executor) {
  if (!element_size(out->type) || self->type != out->type) return kInvalidParameter;
  *workspace = 0;
  *executor = new aclOpExecutor{[self = *self, padding = padding->values, value = number(*value), out = *out] {
    pad(self, padding, value, out);
  }};
  return kOk;
}
SIM_API int aclnnConstantPadNd(void* /*workspace*/, uint64_t /*bytes*/, aclOpExecutor* executor, void* stream) {
  Task task = std::move(executor->task);
  delete executor;
  stream_of(stream).run_in_order(std::move(task));
  return kOk;
}

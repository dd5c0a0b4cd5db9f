// Computation on the simulated NPU: one kernel that runs any operation on host aliases of its NPU arguments.
//
// torch_npu's kernel of an operation (DispatchKey PrivateUse1) is replaced by `Kernel`, which
//   1. replaces every NPU tensor among the arguments by a host tensor over the same memory,
//   2. redispatches to the operation's CPU kernel (for torch_npu's own operations: a reference in kernels/),
//   3. returns written arguments as the tensors they were, and copies fresh results to NPU memory.
// It runs below autograd: formulas, autocast and everything above stay torch's and torch_npu's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "alias.h"
#include "dry.h"
#include "runtime.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr int kNone = -1;

// What the kernel must know of one operation; positions are those of its schema's arguments.
struct Operation {
  std::string name;
  std::vector<int> written;  // for each return: the argument that it is, or kNone if it is fresh
  int generator = kNone;
  int device = kNone;
  int pin_memory = kNone;
  bool draws = false;        // takes random numbers without a generator argument
  bool asks = false;         // its result is a number of the host, or has a shape that depends on values
  bool overwrites = false;   // its result does not depend on what was there
  bool keeps = false;        // writes only where a number is not finite
  bool takes_host = false;   // also accepts host tensors together with NPU tensors, as on hardware
  std::atomic<int64_t> launches{0};
  std::atomic<int64_t> bytes{0};  // of fresh results
};

std::mutex registry_mutex;
// Never destroyed: operations are called until the very end of the process.
auto& operations = *new std::map<std::string, std::unique_ptr<Operation>>;
auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;

Operation& counted(const std::string& name) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto& operation = operations[name];
  if (!operation) {
    operation = std::make_unique<Operation>();
    operation->name = name;
  }
  return *operation;
}

// ---------------------------------------------------------------- arguments

// The devices of the tensors among the arguments of one call.
class Devices {
 public:
  explicit Devices(const Operation& operation) : operation_(operation) {}

  void see(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (on_npu(tensor)) {
      if (npu_ && *npu_ != tensor.device() && !operation_.takes_host) mixed(*npu_, tensor.device());
      if (!npu_) npu_ = tensor.device();
    } else if (tensor.dim() > 0) {  // a host scalar may go with tensors of any device
      other_ = tensor.device();
    }
  }

  // Where the results go.
  c10::Device result() {
    if (npu_ && other_ && !operation_.takes_host) mixed(*npu_, *other_);
    if (npu_ && npu_->has_index()) return *npu_;
    return c10::impl::VirtualGuardImpl(kNpu).getDevice();
  }

  void set(c10::Device device) { npu_ = device; }

 private:
  [[noreturn]] void mixed(c10::Device first, c10::Device second) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first,
                " and ", second, "! (", operation_.name, " on the simulated NPU)");
  }

  const Operation& operation_;
  std::optional<c10::Device> npu_, other_;
};

IValue to_host(const IValue& value, Devices& devices) {
  auto convert = [&](const Tensor& tensor) {
    devices.see(tensor);
    return host_alias(tensor);
  };
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& element : value.toOptionalTensorList()) {
      std::optional<Tensor> tensor = element;
      list.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void take_over_all(const IValue& original, const IValue& alias) {
  if (original.isTensor()) return take_over(original.toTensor(), alias.toTensor());
  if (!original.isTensorList()) return;
  auto originals = original.toTensorVector(), aliases = alias.toTensorVector();
  for (size_t i = 0; i < originals.size(); ++i) take_over(originals[i], aliases[i]);
}

// ---------------------------------------------------------------- memory that is the host's

// What torch_npu documents for tensors of empty_with_swapped_memory (fill_, zero_, npu_apply_adam_w) or CANN for
// their memory (copies); and fused AdamW, the operation that is documented under another name of torch's.
const auto& taken_swapped = *new std::map<std::string, bool>{{"aten::fill_.Scalar", true}, {"aten::fill_.Tensor", true},
    {"aten::zero_", true}, {"aten::copy_", true}, {"npu::npu_apply_adam_w.out", false}, {"aten::_fused_adamw_", false}};

bool swapped(const Tensor& tensor) { return on_npu(tensor) && tensor.numel() && in_host_memory(first_byte(tensor)); }

// Counts what an operation reads and writes there: the one or the other, or both.
void note_swapped(const std::string& name, const Tensor& tensor) {
  static Operation& traffic = counted("swapped");
  auto found = taken_swapped.find(name);
  TORCH_CHECK(found != taken_swapped.end(), name, ": given a tensor of torch_npu.empty_with_swapped_memory, which ",
              "torch_npu documents for fill_, zero_ and npu_apply_adam_w alone");
  ++traffic.launches;
  traffic.bytes += (found->second ? 1 : 2) * tensor.numel() * tensor.element_size();
}

void note_swapped(const std::string& name, const IValue& value) {
  if (value.isTensor() && swapped(value.toTensor())) note_swapped(name, value.toTensor());
  if (value.isTensorList())
    for (const Tensor& tensor : value.toTensorVector())
      if (swapped(tensor)) note_swapped(name, tensor);
}

// ---------------------------------------------------------------- random numbers

// SplitMix64 (Steele, Lea, Flood 2014): spreads (seed, offset) over all 64 bits.
uint64_t mix(uint64_t seed, uint64_t offset) {
  uint64_t x = seed + 0x9e3779b97f4a7c15ull * (offset + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Takes the next seed from an NPU generator, which thereby advances as on hardware: its state is (seed,
// offset), it can be read, set and forked, and equal states give equal numbers.
uint64_t draw_seed(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);  // offsets are multiples of 4 in torch
  return mix(generator.current_seed(), offset);
}

// While it lives, the host's default generator has another state: for operations that draw from it because
// they have no generator argument. Afterwards the host's sequence goes on as if nothing had been drawn.
class BorrowedHostGenerator {
 public:
  explicit BorrowedHostGenerator(uint64_t seed)
      : turn_(one_at_a_time), host_(at::globalContext().defaultGenerator(c10::Device(c10::kCPU))) {
    std::lock_guard<std::mutex> lock(host_.mutex());
    state_ = host_.get_state();
    host_.set_current_seed(seed);
  }
  ~BorrowedHostGenerator() {
    std::lock_guard<std::mutex> lock(host_.mutex());
    host_.set_state(state_);
  }

 private:
  static inline std::mutex one_at_a_time;  // backward runs on threads of its own
  std::lock_guard<std::mutex> turn_;
  at::Generator host_;
  Tensor state_;
};

// ---------------------------------------------------------------- the kernel

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(Operation* operation) : operation_(*operation) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
    ++operation_.launches;
    const size_t count = handle.schema().arguments().size();
    Devices devices(operation_);
    std::vector<IValue> originals = torch::jit::pop(*stack, count), hosts;
    for (const IValue& value : originals) {
      note_swapped(operation_.name, value);
      hosts.push_back(to_host(value, devices));
    }

    bool result_on_npu = true;
    if (operation_.device != kNone && originals[operation_.device].isDevice()) {
      auto asked = originals[operation_.device].toDevice();
      result_on_npu = asked.type() == kNpu;
      if (result_on_npu) {
        devices.set(asked);
        hosts[operation_.device] = c10::Device(c10::kCPU);
      }
    }
    if (operation_.pin_memory != kNone) hosts[operation_.pin_memory] = IValue();
    c10::Device device = devices.result();
    c10::OptionalDeviceGuard guard(device);  // the first use of a device initialises it
    wait_for_queued(c10_npu::getCurrentNPUStream(device.index()).stream());

    std::optional<BorrowedHostGenerator> borrowed;
    supply_randomness(originals, hosts, device, borrowed);
    bool unknown = false;
    if (dry::on()) {
      for (const IValue& value : originals) unknown = unknown || dry::is_unknown(value);
      if (unknown && operation_.asks) dry::report_asked(operation_.name);
      if (result_on_npu && skipped(handle, originals, hosts, device, unknown, stack)) return;
    }
    stack->insert(stack->end(), hosts.begin(), hosts.end());
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

    for (size_t i = 0; i < count; ++i) {
      auto* alias = handle.schema().arguments()[i].alias_info();
      if (alias && alias->isWrite()) take_over_all(originals[i], hosts[i]);
    }
    std::vector<IValue> results = torch::jit::pop(*stack, handle.schema().returns().size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (operation_.written[i] != kNone) {
        stack->push_back(originals[operation_.written[i]]);
      } else {
        stack->push_back(result_on_npu ? fresh(results[i], device) : results[i]);
      }
    }
    if (dry::on()) remember(handle, originals, *stack, results.size(), unknown && !operation_.overwrites);
  }

 private:
  // In a dry run: gives the results of an operation on large tensors as memory that nobody touches; false if it
  // has to be computed.
  bool skipped(const c10::OperatorHandle& handle, const std::vector<IValue>& originals,
               const std::vector<IValue>& hosts, c10::Device device, bool unknown, Stack* stack) {
    int64_t most = 0;
    for (const IValue& value : originals)
      dry::each_tensor(value, [&](const Tensor& tensor) { most = std::max(most, dry::bytes_of(tensor)); });
    const bool large = most > dry_limit();
    const bool own = operation_.name.rfind("npu::", 0) == 0;
    const bool has_meta = handle.hasKernelForDispatchKey(c10::DispatchKey::Meta) || !own;
    if (!has_meta && !large) return false;  // its reference would draw and check twice
    std::vector<IValue> metas = as_meta(hosts);
    std::vector<IValue> results;
    try {
      Stack trial(metas.begin(), metas.end());
      // the reference of an operation of torch_npu's computes on meta tensors as well, unless it reads values
      handle.redispatchBoxed(c10::DispatchKeySet(has_meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU), &trial);
      results = torch::jit::pop(trial, handle.schema().returns().size());
    } catch (const std::exception& error) {
      if (!large || !only_writes() || has_meta) {
        // no meta kernel, or a mistake in the call: the host's kernel computes, or says it
        if (large) ++counted("dry computed " + operation_.name).launches;
        if (unknown && !operation_.asks) dry::report_asked(operation_.name);
        return false;
      }
      ++counted("dry unchecked " + operation_.name).launches;
    }
    as_computed(hosts, results);
    for (size_t i = 0; i < results.size(); ++i)
      if (operation_.written[i] == kNone)
        dry::each_tensor(results[i], [&](const Tensor& tensor) { most = std::max(most, dry::bytes_of(tensor)); });
    if (most <= dry_limit()) return false;
    for (size_t i = 0; i < originals.size(); ++i) {
      auto* alias = handle.schema().arguments()[i].alias_info();
      if (!alias || !alias->isWrite()) continue;
      follow(originals[i], metas[i]);
      if (handle.schema().arguments()[i].is_out())  // memory that nothing has written yet
        dry::each_tensor(originals[i], [&](const Tensor& tensor) { dry::read_as_one(tensor, operation_.name); });
    }
    for (size_t i = 0; i < operation_.written.size(); ++i) {
      if (operation_.written[i] != kNone) {
        stack->push_back(originals[operation_.written[i]]);
      } else {
        stack->push_back(untouched(results[i], device));
      }
    }
    return true;
  }

  // Where torch's meta kernel says another dtype than the host's kernel gives, which is what is computed otherwise:
  // the statistics of a layer norm have the input's dtype, unless the weights have another.
  void as_computed(const std::vector<IValue>& hosts, std::vector<IValue>& results) const {
    if (operation_.name != "aten::native_layer_norm" || results.size() != 3) return;
    auto dtype = hosts[0].toTensor().scalar_type();
    if (hosts[2].isTensor() && hosts[2].toTensor().defined() && hosts[2].toTensor().scalar_type() != dtype) return;
    for (size_t i : {1, 2}) results[i] = results[i].toTensor().to(dtype);
  }

  bool only_writes() const {
    for (int written : operation_.written)
      if (written == kNone) return false;
    return true;
  }

  std::vector<IValue> as_meta(const std::vector<IValue>& hosts) const {
    std::vector<IValue> metas;
    bool has_tensor = false;
    for (const IValue& value : hosts) {
      dry::each_tensor(value, [&](const Tensor&) { has_tensor = true; });
      metas.push_back(dry::to_meta(value));
    }
    if (operation_.device != kNone && (metas[operation_.device].isDevice() || !has_tensor))
      metas[operation_.device] = c10::Device(c10::kMeta);
    if (operation_.generator != kNone) metas[operation_.generator] = IValue();
    return metas;
  }

  // An argument that was written without being computed: it may have got another size, and nobody knows it now.
  void follow(const IValue& original, const IValue& meta) const {
    if (original.isTensor() && meta.isTensor() && on_npu(original.toTensor()) && meta.toTensor().defined() &&
        meta.toTensor().sizes() != original.toTensor().sizes())
      original.toTensor().resize_(meta.toTensor().sizes());
    // what is written to only on a condition (an overflow) is taken for not written
    if (!operation_.keeps) dry::each_tensor(original, [&](const Tensor& tensor) { dry::mark(tensor, true); });
  }

  IValue untouched(const IValue& result, c10::Device device) {
    auto give = [&](const Tensor& tensor) {
      if (tensor.defined()) operation_.bytes += tensor.numel() * tensor.element_size();
      return dry::from_meta(tensor, device, operation_.name);
    };
    if (result.isTensor()) return give(result.toTensor());
    if (!result.isTensorList()) return result;
    std::vector<Tensor> list;
    for (const Tensor& tensor : result.toTensorVector()) list.push_back(give(tensor));
    return list;
  }

  // Notes of all that an operation has computed whether it is known.
  void remember(const c10::OperatorHandle& handle, const std::vector<IValue>& originals, const Stack& stack,
                size_t results, bool unknown) const {
    auto note = [&](const Tensor& tensor) { dry::mark(tensor, unknown); };
    for (size_t i = 0; i < originals.size(); ++i) {
      auto* alias = handle.schema().arguments()[i].alias_info();
      if (alias && alias->isWrite()) dry::each_tensor(originals[i], note);
    }
    for (size_t i = stack.size() - results; i < stack.size(); ++i) dry::each_tensor(stack[i], note);
  }

  void supply_randomness(const std::vector<IValue>& originals, std::vector<IValue>& hosts, c10::Device device,
                         std::optional<BorrowedHostGenerator>& borrowed) {
    if (operation_.generator == kNone && !operation_.draws) return;
    at::Generator generator = at::globalContext().defaultGenerator(device);
    if (operation_.generator != kNone && !originals[operation_.generator].isNone()) {
      generator = originals[operation_.generator].toGenerator();
      TORCH_CHECK(generator.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
                  generator.device().type(), "'");
    }
    uint64_t seed = draw_seed(generator);
    if (operation_.generator != kNone) {
      hosts[operation_.generator] = at::make_generator<at::CPUGeneratorImpl>(seed);
    } else {
      borrowed.emplace(seed);
    }
  }

  IValue fresh(const IValue& value, c10::Device device) {
    auto convert = [&](const Tensor& tensor) {
      if (tensor.defined()) operation_.bytes += tensor.numel() * tensor.element_size();
      return to_device(tensor, device);
    };
    if (value.isTensor()) return convert(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }

  Operation& operation_;
};

// ---------------------------------------------------------------- copies

// Copies between any two devices and dtypes. Only one within the device is a kernel on hardware; the others
// are transfers and are counted under another name.
Tensor copy_from(const Tensor& source, const Tensor& target, bool /*non_blocking*/) {
  static Operation& kernel = counted("aten::copy_");
  static Operation& transfer = counted("transfer");
  Operation& operation = on_npu(source) && on_npu(target) ? kernel : transfer;
  ++operation.launches;
  operation.bytes += target.numel() * target.element_size();
  for (const Tensor& tensor : {source, target})
    if (swapped(tensor)) note_swapped(kernel.name, tensor);
  if (dry::on() && !dry::copies(source, target)) return target;
  auto device = on_npu(target) ? target.device() : source.device();
  c10::OptionalDeviceGuard guard(device);
  wait_for_queued(c10_npu::getCurrentNPUStream(device.index()).stream());
  host_alias(target).copy_(host_alias(source));
  return target;
}

Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  copy_from(source, target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// ---------------------------------------------------------------- installation

// Fills what the schema says; false if the operation must stay torch_npu's: it returns a view, or it only
// changes metadata in place (transpose_ would silently change the alias instead of the tensor).
bool describe(const c10::OperatorHandle& handle, Operation& operation) {
  if (handle.hasTag(at::Tag::inplace_view)) return false;
  const auto& arguments = handle.schema().arguments();
  for (const auto& result : handle.schema().returns()) {
    int position = kNone;
    if (auto* alias = result.alias_info()) {
      if (!alias->isWrite()) return false;
      for (size_t i = 0; i < arguments.size(); ++i) {
        auto* written = arguments[i].alias_info();
        if (written && written->isWrite() && written->beforeSets() == alias->beforeSets()) position = i;
      }
    }
    operation.written.push_back(position);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") operation.generator = i;
    if (arguments[i].name() == "device") operation.device = i;
    if (arguments[i].name() == "pin_memory") operation.pin_memory = i;
  }
  // The kernels of torch_npu's own operations draw from the device's generator themselves, and only if they must.
  bool draws_itself = operation.name.rfind("npu::", 0) == 0;
  operation.draws =
      operation.generator == kNone && !draws_itself && handle.hasTag(at::Tag::nondeterministic_seeded);
  return true;
}

torch::Library& library(const std::string& space, c10::DispatchKey key) {
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, key, __FILE__, __LINE__));
  return *libraries.back();
}

void run_composite(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
}

thread_local std::string last_error;

template <typename Body>
int guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return 2;
  }
}

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API const char* sim_error() { return last_error.c_str(); }

// Overrides one operation, named as in aten::add.out. 0: done; 1: it stays torch_npu's; 2: see sim_error.
SIM_API int sim_install(const char* full_name) {
  return guarded([&] {
    std::string full(full_name), space = full.substr(0, full.find("::")), name = full.substr(space.size() + 2);
    std::string base = name.substr(0, name.find('.')), overload = name.substr(std::min(base.size() + 1, name.size()));
    auto handle = c10::Dispatcher::singleton().findSchema({space + "::" + base, overload});
    if (!handle) return 1;
    auto operation = std::make_unique<Operation>();
    operation->name = full;
    // Hardware takes indices on the host and copies between devices.
    operation->takes_host = base.find("copy") != std::string::npos || base.find("index") != std::string::npos;
    if (!describe(*handle, *operation)) return 1;
    operation->asks = full == "aten::_local_scalar_dense" || full == "aten::equal" ||
                      handle->hasTag(at::Tag::data_dependent_output) || handle->hasTag(at::Tag::dynamic_output_shape);
    operation->overwrites = base == "fill_" || base == "zero_";
    operation->keeps = base == "_amp_foreach_non_finite_check_and_unscale_";
    std::lock_guard<std::mutex> lock(registry_mutex);
    auto kernel = std::make_unique<Kernel>(operation.get());
    library(space, c10::DispatchKey::PrivateUse1)
        .impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    operations[full] = std::move(operation);
    return 0;
  });
}

// For an operation whose autograd kernel in torch_npu calls op-plugin directly, past the dispatcher: runs
// torch's composite body instead, whose inner operations are dispatched on the NPU tensors again.
SIM_API int sim_install_composite(const char* name) {
  return guarded([&] {
    std::lock_guard<std::mutex> lock(registry_mutex);
    library("aten", c10::DispatchKey::AutogradPrivateUse1)
        .impl(name, torch::CppFunction::makeFromBoxedFunction<&run_composite>());
    return 0;
  });
}

SIM_API int sim_install_copy() {
  return guarded([&] {
    std::lock_guard<std::mutex> lock(registry_mutex);
    auto& copies = library("aten", c10::DispatchKey::PrivateUse1);
    copies.impl("copy_", TORCH_FN(copy_));
    copies.impl("_copy_from", TORCH_FN(copy_from));
    copies.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    return 0;
  });
}

// Who is to be told that an unknown number is asked for, in a dry run; see dry.h.
SIM_API void sim_on_asked(void (*report)(const char*)) { dry::asked = report; }

// Whether nobody knows the numbers of a tensor, given its memory.
SIM_API int sim_is_unknown(const void* storage) {
  std::lock_guard<std::mutex> lock(dry::unknown_mutex);
  return dry::unknown_storages.count(storage) != 0;
}

// Lines "name launches bytes", one per operation that was called. Returns the length of the whole text.
SIM_API size_t sim_launches(char* buffer, size_t capacity) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  std::string text;
  for (auto& [name, operation] : operations)
    if (operation->launches)
      text += name + " " + std::to_string(operation->launches) + " " + std::to_string(operation->bytes) + "\n";
  return give_text(text, buffer, capacity);
}

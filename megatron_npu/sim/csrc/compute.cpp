// simulated NPU ops: one boxed kernel that runs any op registered for PrivateUse1 on a CPU alias of the NPU tensors.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include "torch_npu/csrc/core/npu/NPUStream.h"

#include "runtime.h"
#define API SIM_API
using at::Tensor;
namespace {
constexpr auto NPU = c10::DeviceType::PrivateUse1;
struct Info {
  std::string name; std::vector<int> ret_arg;   // return i is argument j (written), -1 = fresh
  int gen = -1, dev = -1, pin = -1; bool seeded = false, mixed = false; std::atomic<int64_t> calls{0}, ns{0}, bytes{0};
};
std::mutex mu; std::unordered_map<std::string, std::unique_ptr<Info>> infos; std::vector<std::unique_ptr<torch::Library>> libs;
bool trace = false, timing = false;
std::atomic<bool> strict_device{true};

inline bool is_npu(const Tensor& t) { return t.defined() && t.device().type() == NPU; }
Tensor host_view(const Tensor& t) {
  if (!is_npu(t)) return t;
  c10::Storage st(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(const_cast<void*>(t.storage().data()), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
  auto o = at::detail::make_tensor<c10::TensorImpl>(std::move(st), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  o.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) o._set_conj(true);
  if (t.is_neg()) o._set_neg(true);
  return o;
}
Tensor to_npu(Tensor t, c10::Device dev, Info* in) {
  if (!t.defined() || is_npu(t)) return t;
  if (!t.is_non_overlapping_and_dense()) t = t.contiguous();
  Tensor o = at::empty_strided(t.sizes(), t.strides(), t.options().device(dev).pinned_memory(false));
  if (t.numel()) memcpy(const_cast<void*>(o.storage().data()), (const char*)t.const_data_ptr(), t.numel() * t.element_size());
  in->bytes += t.numel() * t.element_size();
  return o;
}
// after the CPU kernel: propagate a resize of a written argument back to the NPU tensor
void write_back(const Tensor& orig, const Tensor& conv) {
  if (!is_npu(orig) || !conv.defined()) return;
  const char* p = orig.storage().data() ? (const char*)orig.storage().data() + orig.storage_offset() * orig.element_size() : nullptr;
  bool same = conv.numel() == 0 || conv.const_data_ptr() == p;
  if (same && conv.sizes() == orig.sizes() && conv.strides() == orig.strides()) return;
  if (conv.sizes() != orig.sizes()) orig.resize_(conv.sizes());
  if (conv.numel() && !(same && conv.strides() == orig.strides())) host_view(orig).copy_(conv);
}
struct Tls { int depth = 0; } ; thread_local Tls tls;

void run(Info* in, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema(); size_t n = schema.arguments().size();
  auto args = torch::jit::last(*stack, n);
  std::vector<c10::IValue> orig(args.begin(), args.end()), conv; conv.reserve(n);
  c10::optional<c10::Device> dev; bool cpu_arg = false; 
  auto see = [&](const Tensor& t) { if (!t.defined()) return; if (is_npu(t)) { if (!dev) dev = t.device(); } else if (t.is_cpu() && t.dim() > 0) cpu_arg = true; };
  for (size_t i = 0; i < n; i++) {
    auto& v = orig[i];
    if (v.isTensor()) { see(v.toTensor()); conv.emplace_back(host_view(v.toTensor())); }
    else if (v.isTensorList()) { std::vector<Tensor> o; for (const Tensor& t : v.toTensorVector()) { see(t); o.push_back(host_view(t)); } conv.emplace_back(std::move(o)); }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> o; for (const auto& e : v.toOptionalTensorList()) { std::optional<Tensor> t = e; o.push_back(t ? std::optional<Tensor>(host_view(*t)) : t); } conv.emplace_back(std::move(o)); }
    else conv.push_back(v);
  }
  if (in->dev >= 0 && orig[in->dev].isDevice() ) { dev = orig[in->dev].toDevice(); if (dev->type() == NPU) conv[in->dev] = c10::Device(c10::kCPU); }
  if (in->pin >= 0) conv[in->pin] = c10::IValue();
  c10::impl::VirtualGuardImpl g(NPU);
  if (!dev || dev->type() != NPU) dev = g.getDevice();
  if (!dev->has_index()) dev = g.getDevice();
  if (cpu_arg && !in->mixed && strict_device)
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *dev, " and cpu! (simulated NPU, ", in->name, ")");
  sim::wait_for_queued(c10_npu::getCurrentNPUStream(dev->index()).stream());

  at::Generator saved_default; Tensor saved;
  if (in->gen >= 0 || in->seeded) {
    at::Generator gen = in->gen >= 0 && !orig[in->gen].isNone() ? orig[in->gen].toGenerator() : at::globalContext().defaultGenerator(*dev);
    if (gen.device().type() == NPU) {
      std::lock_guard<std::mutex> l(gen.mutex());
      uint64_t off = gen.get_offset(), x = gen.current_seed() + 0x9e3779b97f4a7c15ull * (off + 1);
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull; x = (x ^ (x >> 27)) * 0x94d049bb133111ebull; x ^= x >> 31;
      gen.set_offset(off + 4);
      if (in->gen >= 0) conv[in->gen] = at::make_generator<at::CPUGeneratorImpl>(x);
      else { saved_default = at::globalContext().defaultGenerator(c10::Device(c10::kCPU)); std::lock_guard<std::mutex> l2(saved_default.mutex()); saved = saved_default.get_state(); saved_default.set_current_seed(x); }
    }
  }
  torch::jit::drop(*stack, n);
  for (auto& v : conv) stack->push_back(v);
  tls.depth++;
  try { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); } catch (...) { tls.depth--; if (saved.defined()) saved_default.set_state(saved); throw; }
  tls.depth--;
  if (saved.defined()) { std::lock_guard<std::mutex> l2(saved_default.mutex()); saved_default.set_state(saved); }
  for (size_t j = 0; j < n; j++) {
    auto* a = schema.arguments()[j].alias_info(); if (!a || !a->isWrite()) continue;
    if (orig[j].isTensor()) write_back(orig[j].toTensor(), conv[j].toTensor());
    else if (orig[j].isTensorList()) { auto o = orig[j].toTensorVector(), c = conv[j].toTensorVector(); for (size_t k = 0; k < o.size(); k++) write_back(o[k], c[k]); }
  }
  size_t nr = schema.returns().size(); auto rets = torch::jit::last(*stack, nr); std::vector<c10::IValue> out;
  for (size_t i = 0; i < nr; i++) {
    auto& r = rets[i];
    if (in->ret_arg[i] >= 0) out.push_back(orig[in->ret_arg[i]]);
    else if (r.isTensor()) out.emplace_back(to_npu(r.toTensor(), *dev, in));
    else if (r.isTensorList()) { std::vector<Tensor> o; for (const Tensor& t : r.toTensorVector()) o.push_back(to_npu(t, *dev, in)); out.emplace_back(std::move(o)); }
    else out.push_back(r);
  }
  torch::jit::drop(*stack, nr);
  for (auto& v : out) stack->push_back(std::move(v));
}
struct Kernel : c10::OperatorKernel {
  Info* in; explicit Kernel(Info* i) : in(i) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* s) {
    in->calls++;
    if (trace) fprintf(stderr, "[simulated NPU op] %s\n", in->name.c_str());
    if (!timing) return run(in, op, s);
    auto t = std::chrono::steady_clock::now(); run(in, op, s);
    in->ns += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - t).count();
  }
};
Tensor copy_from(const Tensor& s, const Tensor& d, bool) {
  sim::wait_for_queued(c10_npu::getCurrentNPUStream(is_npu(d) ? d.device().index() : s.device().index()).stream());
  auto a = host_view(d); a.copy_(host_view(s)); return d; }
Tensor copy_from_and_resize(const Tensor& s, const Tensor& d) { d.resize_(s.sizes()); return copy_from(s, d, false); }
std::string g_err;
}  // namespace

API const char* sim_error() { return g_err.c_str(); }
API void sim_strict_device(int v) { strict_device = v; }
// returns 0 ok, 1 skipped (view / no schema), 2 error
API int sim_install(const char* full) {
  try {
    std::string q(full), ns = q.substr(0, q.find("::")), nm = q.substr(q.find("::") + 2), base = nm.substr(0, nm.find('.')), ov = nm.find('.') == std::string::npos ? "" : nm.substr(nm.find('.') + 1);
    auto h = c10::Dispatcher::singleton().findSchema({ns + "::" + base, ov}); if (!h) return 1;
    if (h->hasTag(at::Tag::inplace_view)) return 1;   // transpose_ and friends only touch metadata
    auto& s = h->schema(); auto in = std::make_unique<Info>(); in->name = q;
    for (auto& r : s.returns()) {
      int a = -1;
      if (r.alias_info()) {
        if (!r.alias_info()->isWrite()) return 1;
        for (size_t j = 0; j < s.arguments().size(); j++) { auto* x = s.arguments()[j].alias_info(); if (x && x->isWrite() && x->beforeSets() == r.alias_info()->beforeSets()) a = j; }
      }
      in->ret_arg.push_back(a);
    }
    for (size_t j = 0; j < s.arguments().size(); j++) { auto& a = s.arguments()[j]; if (a.name() == "generator") in->gen = j; if (a.name() == "device") in->dev = j; if (a.name() == "pin_memory") in->pin = j; }
    in->seeded = in->gen < 0 && h->hasTag(at::Tag::nondeterministic_seeded);
    in->mixed = base.find("copy") != std::string::npos || base.find("index") != std::string::npos || ns == "npu";
    auto L = std::make_unique<torch::Library>(torch::Library::IMPL, ns, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    Info* p = in.get();
    L->impl(nm.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(p)));
    std::lock_guard<std::mutex> l(mu); infos[q] = std::move(in); libs.push_back(std::move(L)); return 0;
  } catch (std::exception& e) { g_err = e.what(); return 2; }
}
// For ops whose AutogradPrivateUse1 kernel in torch_npu calls op_plugin directly: run PyTorch's composite body instead
// (its inner ops dispatch on the NPU tensors again).
static void composite(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* s) { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), s); }
API int sim_install_composite(const char* nm) {
  try { auto L = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    L->impl(nm, torch::CppFunction::makeFromBoxedFunction<&composite>()); libs.push_back(std::move(L)); return 0; } catch (std::exception& e) { g_err = e.what(); return 2; }
}
API void sim_install_copy() {
  auto L = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  L->impl("_copy_from", TORCH_FN(copy_from)); L->impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize)); libs.push_back(std::move(L));
}
API size_t sim_launches(char* o, size_t cap, int reset) {
  std::lock_guard<std::mutex> l(mu); std::string s;
  for (auto& p : infos) { auto c = p.second->calls.load(); if (!c) continue; s += p.first + " " + std::to_string(c) + " " + std::to_string(p.second->ns.load()) + " " + std::to_string(p.second->bytes.load()) + "\n"; if (reset) { p.second->calls = 0; p.second->ns = 0; p.second->bytes = 0; } }
  if (o && cap) { size_t k = std::min(cap - 1, s.size()); memcpy(o, s.data(), k); o[k] = 0; } return s.size(); }

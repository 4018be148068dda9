// The emulated device: what torch asks of one, and the few operators that move bytes. The rest of torch_npu is Python.

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;

// --- what torch asks of a device -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {NPU, (c10::DeviceIndex)current_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "npu: no device ", d.index());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    int i = d.index() < 0 ? current_device : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {NPU, (c10::DeviceIndex)i}, current_stream[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, ++last_stream[d.index() < 0 ? current_device : d.index()]);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(s.device_index(), s.id()); }
  void synchronizeDevice(c10::DeviceIndex i) const override {
    std::vector<int64_t> all;
    {
      std::lock_guard<std::mutex> lock(pushing);
      for (auto& s : streams[i]) all.push_back(s.first);
    }
    for (auto s : all) synchronize(i, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current_device = i; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    auto old = current_device;
    if (i >= 0) current_device = i;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
} hooks;

// --- operators -----------------------------------------------------------------------------------------------------

// The same memory as a tensor of the host, for a task. It keeps nothing alive, as no task of a device does.
Tensor host(const Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(c10::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(real_of(t.data_ptr()), t.sizes(), t.strides(), options);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> at) {
  std::optional<int64_t> offset;
  if (at) offset = at->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

Tensor reshape(const Tensor& self, c10::SymIntArrayRef size) { return self.view_symint(size); }

void on_device(const std::function<void()>& work) {
  int d = current_device;
  push(d, current_stream[d], Task{[work] { c10::NoGradGuard guard; work(); }});
}

// Between device and host, contiguous and of one dtype: asynchronous where the host's side is pinned, and then the
// pinned block stays until it is done; else the stream is waited for.
void cross(const Tensor& src, const Tensor& dst, bool async) {
  bool out = dst.is_cpu();
  c10::DeviceGuard guard(out ? src.device() : dst.device());
  Tensor near = out ? dst : src;
  Tensor from = out ? host(src) : src, to = out ? dst : host(dst);
  on_device([near, from, to] { to.copy_(from); });
  if (!(async && is_pinned(near.data_ptr()))) synchronize(current_device, current_stream[current_device]);
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool async) {
  c10::NoGradGuard no_grad;
  if (dst.numel() == 0) return dst;
  Tensor src = self.expand_as(dst);
  if (!src.is_cpu() && !dst.is_cpu()) {
    c10::DeviceGuard guard(src.device());
    int a = src.get_device(), b = dst.get_device();
    int64_t sa = current_stream[a], sb = current_stream[b];
    if (a != b) wait_in_stream(a, sa, b, sb, put_so_far(b, sb));
    on_device([from = host(src), to = host(dst)] { to.copy_(from); });
    if (a != b) wait_in_stream(b, sb, a, sa, put_so_far(a, sa));
    return dst;
  }
  bool plain = src.dtype() == dst.dtype() && src.is_contiguous() && dst.is_contiguous();
  if (plain) {
    cross(src, dst, async);
  } else if (dst.is_cpu()) {
    Tensor there = src.contiguous(), here = at::empty(dst.sizes(), dst.options().dtype(src.dtype()));
    cross(there, here, false);
    dst.copy_(here);
  } else {
    Tensor here = src.to(dst.scalar_type()).contiguous();
    Tensor there = dst.is_contiguous() ? dst : at::empty(dst.sizes(), dst.options());
    cross(here, there, async);
    if (!there.is_same(dst)) copy_from(there, dst, async);
  }
  return dst;
}

// What was in it is lost where it grows.
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    self.storage().set_data_ptr_noswap(device_memory.allocate(bytes));
    self.storage().set_nbytes(bytes);
  }
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (self.sizes() != dst.sizes()) resize(dst, self.sym_sizes(), std::nullopt);
  return copy_from(self, dst, false);
}

bool batches = true;  // has this chip aclrtMemcpyBatchAsync?
int64_t batched = 0, one_by_one = 0;

// op-plugin's: one batch where all pairs go one way and the device is the current one. It looks at addresses and sizes
// alone, keeps nothing, records nothing, and of pageable memory its launching thread waits, not the caller.
void foreach_copy(at::TensorList to, at::TensorList from, bool async) {
  TORCH_CHECK(!to.empty() && to.size() == from.size(), "npu: lists of different lengths");
  bool fast = batches && to[0].is_cpu() != from[0].is_cpu();
  for (size_t i = 0; i < to.size(); i++) {
    const Tensor& far = to[0].is_cpu() ? from[i] : to[i];
    fast = fast && to[i].is_cpu() == to[0].is_cpu() && from[i].is_cpu() == from[0].is_cpu() && !far.is_cpu() &&
           far.get_device() == current_device;
  }
  if (!fast) {
    one_by_one += to.size();
    for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], async);
    return;
  }
  batched++;
  std::vector<std::tuple<char*, char*, size_t>> moves;
  std::vector<c10::Storage> malloced;  // what was freed and unmapped would kill this process, and prove nothing
  for (size_t i = 0; i < to.size(); i++) {
    TORCH_CHECK(to[i].nbytes() == from[i].nbytes(), "npu: pieces of different sizes");
    auto here = [](const Tensor& t) { return t.is_cpu() ? (char*)t.data_ptr() : real_of(t.data_ptr()); };
    moves.emplace_back(here(to[i]), here(from[i]), to[i].nbytes());
    for (auto& t : {to[i], from[i]})
      if (t.is_cpu() && !is_pinned(t.data_ptr())) malloced.push_back(t.storage());
  }
  on_device([moves, malloced] {
    for (auto& [a, b, n] : moves) memcpy(a, b, n);
  });
  if (!async) synchronize(current_device, current_stream[current_device]);
}

Tensor& fill(Tensor& self, const at::Scalar& value) {
  c10::DeviceGuard guard(self.device());
  on_device([t = host(self), value]() mutable { t.fill_(value); });
  return self;
}

Tensor& zero(Tensor& self) { return fill(self, 0); }

at::Scalar item(const Tensor& self) { return self.cpu().item(); }

void record_stream(Tensor& self, c10::Stream s) {
  if (self.numel()) record(self.storage().data_ptr().get_context(), s.device_index(), s.id());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", &record_stream);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &alias);
  m.impl("_unsafe_view", &reshape);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_foreach_copy_", &foreach_copy);
  m.impl("_local_scalar_dense", &item);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, c10::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) -> Tensor& {
           return at::native::set_storage_cpu_(self, s, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                               C10_AS_INTARRAYREF_SLOW(stride));
         });
}

// Everything else: the arguments to the host, torch's own kernel there, the results back.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(npu_emulated, m) { m.def("host(Tensor t) -> Tensor"); }
TORCH_LIBRARY_IMPL(npu_emulated, PrivateUse1, m) { m.impl("host", &host); }

}  // namespace

// --- for Python ------------------------------------------------------------------------------------------------------

extern "C" {
typedef int (*Kernel)(int64_t number, char* why, int size);
Kernel kernel = nullptr;

void npu_open(Kernel call) {
  kernel = call;
  for (auto& a : arenas) a.open();
  c10::SetAllocator(NPU, &device_memory);
  at::setHostAllocator(NPU, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void npu_forked() {
  for (auto& a : arenas) a.forked();
}
int npu_device() { return current_device; }
void npu_set_device(int d) { current_device = d; }
int64_t npu_stream(int d) { return current_stream[d]; }
void npu_set_stream(int d, int64_t s) { current_stream[d] = s; }
int64_t npu_new_stream(int d) { return ++last_stream[d]; }
int64_t npu_put(int d, int64_t s) { return put_so_far(d, s); }
// One at a time: what is put into the stream goes to a graph that has not begun, until `npu_captured`.
void npu_capture(int d, int64_t s) {
  std::lock_guard<std::mutex> lock(pushing);
  streams[d][s].captured = new Graph;
  capturing++;
}
void* npu_captured(int d, int64_t s) {
  std::lock_guard<std::mutex> lock(pushing);
  capturing--;
  return std::exchange(streams[d][s].captured, nullptr);
}
int npu_capturing(int d) { return is_captured(d, current_stream[d]); }
void npu_replay(int d, void* graph) {
  for (auto& task : *static_cast<Graph*>(graph)) push(d, current_stream[d], task);
}
void npu_reset(void* graph) { delete static_cast<Graph*>(graph); }
void npu_wait(int d, int64_t s, int other, int64_t stream, int64_t until) { wait_in_stream(d, s, other, stream, until); }
void npu_drain(int d, int64_t s, int64_t until) { drain(d, s, until); }
int64_t npu_streams(int d) { return last_stream[d]; }
void npu_batches(int yes) { batches = yes; }
int64_t npu_count(int which) { return which ? one_by_one : batched; }
int64_t npu_used(int d) { return arenas[d].used; }
int npu_query(int d, int64_t s, int64_t until) {
  if (capturing) fail("npu: a question about a stream while one is captured");
  // Who asks again and again gets there.
  Unlocked unlocked;
  std::lock_guard<std::recursive_mutex> lock(running);
  step(d, s, until);
  std::lock_guard<std::mutex> short_lock(pushing);
  return streams[d][s].done >= until;
}
int64_t npu_done(int d, int64_t s) {
  std::lock_guard<std::mutex> lock(pushing);
  return streams[d][s].done;
}
int npu_fault(char* why, int size) {
  std::lock_guard<std::mutex> lock(pushing);
  if (fault.empty()) return 0;
  strncpy(why, fault.c_str(), size - 1);
  fault.clear();
  return 1;
}
void npu_launch(int d, int64_t s, int64_t number) {
  push(d, s, Task{[number] {
    char why[2048] = {0};
    if (kernel(number, why, sizeof why)) fail(why);
  }});
}
}

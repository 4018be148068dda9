// Streams and memory of the emulated devices.
//
// Memory of a device is a file mapped twice. What a tensor says of its address is the mapping that may not be touched:
// the host that reads or writes it dies. The other mapping only the functions here know.
// Nothing that is put into a stream runs before somebody has to wait for it: as late as a device may be, each time.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int64_t SPACE = int64_t(1) << 37;
constexpr size_t GRAIN = 512;
constexpr size_t POISONED = 1 << 20;  // bytes at the beginning of a block that are filled when it changes hands

// --- streams -----------------------------------------------------------------------------------------------------

struct Task {
  std::function<void()> work;
  int device = -1;  // >= 0: waits for a stream of that device instead
  int64_t stream = 0, until = 0;
};

using Graph = std::vector<Task>;

struct Stream {
  std::deque<Task> tasks;
  int64_t put = 0, done = 0;
  Graph* captured = nullptr;  // what is put here now, and does not run
};

std::mutex pushing;              // never held while a task runs
std::recursive_mutex running;
std::map<int64_t, Stream> streams[DEVICES];
int64_t last_stream[DEVICES];
std::string fault;
int capturing = 0;
thread_local int current_device = 0;
thread_local int64_t current_stream[DEVICES];

int64_t push(int device, int64_t stream, Task task) {
  std::lock_guard<std::mutex> lock(pushing);
  Stream& s = streams[device][stream];
  if (s.captured) {
    s.captured->push_back(std::move(task));
    return s.put;
  }
  s.tasks.push_back(std::move(task));
  return ++s.put;
}

int64_t put_so_far(int device, int64_t stream) {
  std::lock_guard<std::mutex> lock(pushing);
  return streams[device][stream].put;
}

bool is_captured(int device, int64_t stream) {
  std::lock_guard<std::mutex> lock(pushing);
  return streams[device][stream].captured;
}

void fail(const char* why) {
  std::lock_guard<std::mutex> lock(pushing);
  if (fault.empty()) fault = why;
}

void wait_in_stream(int device, int64_t stream, int other, int64_t other_stream, int64_t until) {
  bool here = is_captured(device, stream), there = is_captured(other, other_stream);
  if (here != there) return fail("npu: a wait between a captured stream and another is not emulated");
  push(device, stream, Task{nullptr, other, other_stream, until});
}

bool step(int device, int64_t stream, int64_t until);

void run(int device, int64_t stream, int64_t until) {
  while (step(device, stream, until)) {}
}

// Runs the next task of a stream that is not yet done with `until`; whether there was one.
bool step(int device, int64_t stream, int64_t until) {
  Stream* s;
  Task task;
  {
    std::lock_guard<std::mutex> lock(pushing);
    s = &streams[device][stream];
    if (s->done >= until || s->tasks.empty()) return false;
    task = std::move(s->tasks.front());
    s->tasks.pop_front();
  }
  if (task.device >= 0) {
    run(task.device, task.stream, task.until);
  } else {
    task.work();
  }
  task.work = nullptr;  // what it kept goes before it counts as done
  std::lock_guard<std::mutex> lock(pushing);
  s->done++;
  return true;
}

struct Unlocked {  // Python's lock is let go: another thread's task may need it.
  void* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~Unlocked() { if (state) PyEval_RestoreThread(state); }
};

void drain(int device, int64_t stream, int64_t until) {
  if (capturing) return fail("npu: a wait for a stream while one is captured");
  Unlocked unlocked;
  std::lock_guard<std::recursive_mutex> lock(running);
  run(device, stream, until);
}

void raise_fault() {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(pushing);
    std::swap(text, fault);
  }
  TORCH_CHECK(text.empty(), text);
}

void synchronize(int device, int64_t stream) {
  drain(device, stream, put_so_far(device, stream));
  raise_fault();
}

// --- memory ------------------------------------------------------------------------------------------------------

struct Arena {
  char *seen = nullptr, *real = nullptr;
  int64_t top = 0, used = 0;
  bool lost = false;  // a parent's, that was in use
  std::map<std::pair<int64_t, size_t>, std::vector<char*>> free;  // by stream and size, as a caching allocator has it

  // A process has its own; like a device's, it is not to be had on both sides of a fork.
  void forked() {
    lost = top > 0;
    if (lost) return;
    munmap(seen, SPACE);
    munmap(real, SPACE);
    open();
  }

  void open() {
    int fd = memfd_create("npu", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, SPACE) == 0, "npu: no memory");
    int flags = MAP_SHARED | MAP_NORESERVE;
    seen = (char*)mmap(nullptr, SPACE, PROT_NONE, flags, fd, 0);
    real = (char*)mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, flags, fd, 0);
    TORCH_CHECK(seen != MAP_FAILED && real != MAP_FAILED, "npu: no address space");
    close(fd);
  }
} arenas[DEVICES];

char* real_of(const void* p) {
  for (auto& a : arenas)
    if ((char*)p >= a.seen && (char*)p < a.seen + SPACE) return (char*)p - a.seen + a.real;
  TORCH_CHECK(!p, "npu: an address that is no device's");
  return nullptr;
}

struct Block {
  int device;
  int64_t stream;
  size_t size;
  char* at;
  bool captured;  // a graph's, which is replayed after its tensor is gone: nobody else gets it
  std::vector<std::pair<int, int64_t>> users;  // devices and streams that were recorded
};

void poison(char* real, size_t size) { memset(real, 0xA5, std::min(size, POISONED)); }

void release(void* context) {
  auto* b = static_cast<Block*>(context);
  char* real = real_of(b->at);
  size_t size = b->size;
  // At once for its own stream, whose work comes in order; what other streams still do with it is waited for where
  // they were recorded.
  if (b->captured || !is_captured(b->device, b->stream)) {
    for (auto [d, s] : b->users) wait_in_stream(b->device, b->stream, d, s, put_so_far(d, s));
    push(b->device, b->stream, Task{[real, size] { poison(real, size); }});
  }
  std::lock_guard<std::mutex> lock(pushing);
  Arena& a = arenas[b->device];
  if (!b->captured) a.free[{b->stream, b->size}].push_back(b->at);
  a.used -= b->size;
  delete b;
}

void record(void* context, int device, int64_t stream) {
  auto* b = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(pushing);
  if (device != b->device || stream != b->stream) b->users.push_back({device, stream});
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device where(NPU, current_device);
    if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    Arena& a = arenas[current_device];
    TORCH_CHECK(!a.lost, "npu: a process that was forked can't use a device that its parent has used");
    size_t size = (n + GRAIN - 1) / GRAIN * GRAIN;
    auto* b = new Block{current_device, current_stream[current_device], size, nullptr, false, {}};
    bool fresh = false;
    {
      std::lock_guard<std::mutex> lock(pushing);
      auto& kept = a.free[{b->stream, b->size}];
      b->captured = streams[b->device][b->stream].captured;
      if (!kept.empty() && !b->captured) {
        b->at = kept.back();
        kept.pop_back();
      } else {
        TORCH_CHECK(a.top + (int64_t)b->size <= SPACE, "npu: out of memory");
        b->at = a.seen + a.top;
        a.top += b->size;
        fresh = true;
      }
      a.used += b->size;
    }
    if (fresh) poison(real_of(b->at), b->size);
    return {b->at, b, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t n) const override { memcpy(real_of(dest), real_of(src), n); }
} device_memory;

// Pinned memory: of the host, known by its address. What is freed is poisoned, and the next one gets it.
std::map<char*, size_t> pinned;
std::map<size_t, std::vector<char*>> unpinned;

void unpin(void* p) {
  std::lock_guard<std::mutex> lock(pushing);
  size_t size = pinned.at((char*)p);
  poison((char*)p, size);
  pinned.erase((char*)p);
  unpinned[size].push_back((char*)p);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    size_t size = (std::max<size_t>(n, 1) + GRAIN - 1) / GRAIN * GRAIN;
    std::lock_guard<std::mutex> lock(pushing);
    auto& kept = unpinned[size];
    char* at = kept.empty() ? (char*)aligned_alloc(GRAIN, size) : kept.back();
    if (!kept.empty()) kept.pop_back();
    pinned[at] = size;
    return {at, at, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* dest, const void* src, size_t n) const override { memcpy(dest, src, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(pushing);
  auto after = pinned.upper_bound((char*)p);
  return after != pinned.begin() && (char*)p < (--after)->first + after->second;
}

}  // namespace

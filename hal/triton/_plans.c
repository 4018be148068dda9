/* A warm call of an op, from its arguments to its launches: part of _launch.c.

   The key of a call is all that plans depend on: of a tensor its dtype, alignment, sizes but the first, strides, and
   which earlier argument begins where it does; of an int or bool its value; of a float its sign. What is left (pointers,
   first sizes, floats) goes where the plan says. Whatever is not known, or not as before, is for `slow`. */

enum { ARGUMENTS = 24, STEPS = 4, TERMS = 2, RANGES = 2, WORDS = 512, BUCKETS = 256, PLANS = 4096,
       LONGEST = INT32_MAX - 1023 };

typedef struct { int64_t start; int count; struct { int arg; int64_t by, per, times; } term[TERMS]; } Size;
typedef struct { char kind; int arg; uint32_t key; Value value; Size size; } Source;   /* a constant, arg, size, scratch */
typedef struct { Launch *launch; int ranges; struct { int arg; int64_t low, high; } range[RANGES]; Size grid;
                 Source sources[MOST]; } Step;
typedef struct Plan { struct Plan *next; uint64_t hash; size_t words; int count, scratched; Size scratch; Step *steps;
                      int64_t key[]; } Plan;
typedef struct Scratch { struct Scratch *next; int device; void *stream; int64_t size; uint64_t at; } Scratch;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *slow;
  Py_ssize_t count, plans;
  Plan *buckets[BUCKETS];
  Scratch *scratch;
} Plans;

typedef struct { uint32_t key; Value value; int64_t length; } Argument;
typedef struct { int64_t key[WORDS]; size_t words; uint64_t hash; int device; Argument args[ARGUMENTS]; } Call;

/* The pairs of launches that share a scratch: another thread's must not come in between. */
static pthread_mutex_t pairs = PTHREAD_MUTEX_INITIALIZER;

static int read_call(Plans *self, PyObject *const *args, Call *to) {
  size_t w = 1;
  to->device = -1;
  for (Py_ssize_t n = 0; n < self->count; n++) {
    PyObject *a = args[n];
    PyTypeObject *type = Py_TYPE(a);
    Argument *arg = &to->args[n];
    if ((PyObject *)type == tensor_type || (PyObject *)type == parameter_type) {
      Tensor t;
      if (exchange->read(a, &t) != 0 || t.device.type != device_type || t.dtype.lanes != 1 || t.strides == NULL
          || (to->device >= 0 && t.device.id != to->device) || w + 2u * (size_t)t.ndim + 1u > WORDS) return 0;
      to->device = t.device.id;
      arg->value.u = (uint64_t)(uintptr_t)t.data + t.byte_offset;
      uint32_t aligned = (arg->value.u & 15) == 0;
      arg->key = POINTER | (uint32_t)t.dtype.code << 12 | (uint32_t)t.dtype.bits << 4 | aligned;
      arg->length = t.ndim ? t.shape[0] : 1;
      if (arg->length > LONGEST) return 0;
      Py_ssize_t same = 0;
      while (!(to->args[same].key >> 28 == POINTER >> 28 && to->args[same].value.u == arg->value.u)) same++;
      to->key[w++] = (int64_t)arg->key | (int64_t)t.ndim << 32 | (int64_t)same << 40;
      for (int i = 1; i < t.ndim; i++) to->key[w++] = t.shape[i];
      for (int i = 0; i < t.ndim; i++) to->key[w++] = t.strides[i];
      continue;
    }
    if (w + 2 > WORDS) return 0;
    arg->length = -1;
    arg->key = FLOAT;
    if (a == Py_None) {
      arg->value.u = 0;
      to->key[w++] = arg->key = NONE;
    } else if (type == &PyFloat_Type) {
      double v = arg->value.d = PyFloat_AS_DOUBLE(a);
      to->key[w++] = FLOAT | (v > 0 ? 1 : v < 0 ? 2 : v == 0 ? 3 : 4);
    } else if (type == &PyBool_Type || type == &PyLong_Type) {
      int over;
      int64_t v = PyLong_AsLongLongAndOverflow(a, &over);
      if (over) return 0;
      arg->value.d = (double)v;
      to->key[w++] = type == &PyBool_Type ? BOOL : INT;
      to->key[w++] = v;
    } else {
      return 0;
    }
  }
  to->key[0] = to->device;
  to->words = w;
  to->hash = 0;
  for (size_t i = 0; i < w; i++) to->hash = (to->hash ^ (uint64_t)to->key[i]) * 0x9E3779B97F4A7C15u;
  to->hash ^= to->hash >> 32;
  return to->device >= 0;
}

static Plan *plan_of(Plans *self, const Call *call) {
  for (Plan *p = self->buckets[call->hash % BUCKETS]; p != NULL; p = p->next)
    if (p->hash == call->hash && p->words == call->words && memcmp(p->key, call->key, sizeof(int64_t) * p->words) == 0)
      return p;
  return NULL;
}

static int64_t evaluate(const Size *s, const Call *call) {
  int64_t sum = s->start;
  for (int i = 0; i < s->count; i++)
    sum += (call->args[s->term[i].arg].length * s->term[i].by + s->term[i].per - 1) / s->term[i].per * s->term[i].times;
  return sum;
}

static uint64_t scratch_of(Plans *self, int device, void *stream, int64_t size) {
  int capturing;
  if (captures((CUstream)stream, &capturing) != CUDA_SUCCESS || capturing) return 0;
  for (Scratch *s = self->scratch; s != NULL; s = s->next)
    if (s->device == device && s->stream == stream) return s->size >= size ? s->at : 0;
  return 0;
}

/* A kernel's arguments by their sources. */
static void take(const Step *step, const Call *call, uint64_t scratch, uint32_t *key, Value *values) {
  for (Py_ssize_t i = 0; i < step->launch->count; i++) {
    const Source *s = &step->sources[i];
    uint8_t param = step->launch->params[i];
    switch (s->kind) {
      case 'c': key[i] = s->key; values[i] = s->value; break;
      case 'a': key[i] = call->args[s->arg].key;
                if (key[i] >> 28 == POINTER >> 28 && !(param & SPECIALISED)) key[i] |= 1;
                values[i] = call->args[s->arg].value;
                break;
      case 's': values[i].i = evaluate(&s->size, call); key[i] = integer(param, values[i].i); break;
      default: values[i].u = scratch + 4u * (uint64_t)evaluate(&s->size, call);
               key[i] = POINTER | 2u << 12 | 32u << 4 | (!(param & SPECIALISED) || (values[i].u & 15) == 0);
    }
  }
}

static PyObject *warm(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names) {
  Plans *self = (Plans *)object;
  Call call;
  Started started[STEPS];
  int count = 0;
  void *stream;
  uint64_t scratch = 0;
  CUdevice now;
  if (names != NULL || PyVectorcall_NARGS(nargsf) != self->count || !read_call(self, args, &call)) goto slow;
  const Plan *plan = plan_of(self, &call);
  if (plan == NULL || current_device(&now) != CUDA_SUCCESS || now != call.device
      || exchange->stream(device_type, call.device, &stream) != 0) goto slow;
  if (plan->scratched && (scratch = scratch_of(self, call.device, stream, evaluate(&plan->scratch, &call))) == 0) goto slow;
  for (int i = 0; i < plan->count; i++) {
    const Step *step = &plan->steps[i];
    int within = 1;
    for (int r = 0; r < step->ranges; r++) {
      int64_t length = call.args[step->range[r].arg].length;
      within &= length > step->range[r].low && length <= step->range[r].high;
    }
    int64_t grid = evaluate(&step->grid, &call);
    if (!within || grid == 0) continue;
    uint32_t key[MOST];
    Started *s = &started[count++];
    take(step, &call, scratch, key, s->values);
    if (grid < 0 || grid > INT32_MAX || !ready(step->launch, key, call.device, s)) goto slow;
    s->grid[0] = (unsigned)grid;
    s->grid[1] = s->grid[2] = 1;
  }
  return begin(started, count, stream, plan->scratched ? &pairs : NULL);
slow:
  PyErr_Clear();
  return PyObject_Vectorcall(self->slow, args, nargsf, names);
}

static int size_of(PyObject *from, Py_ssize_t args, Size *to) {
  if (!PyTuple_Check(from) || PyTuple_GET_SIZE(from) < 1 || PyTuple_GET_SIZE(from) > 1 + TERMS) return 0;
  to->start = PyLong_AsLongLong(PyTuple_GET_ITEM(from, 0));
  to->count = (int)PyTuple_GET_SIZE(from) - 1;
  for (int i = 0; i < to->count; i++) {
    long long by, per, times;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(from, i + 1), "iLLL", &to->term[i].arg, &by, &per, &times)) return 0;
    to->term[i].by = by;
    to->term[i].per = per;
    to->term[i].times = times;
    if (per < 1 || to->term[i].arg < 0 || to->term[i].arg >= args) return 0;
  }
  return !PyErr_Occurred();
}

/* (launch, ranges, grid, sources) as a step. */
static int step_of(PyObject *from, Py_ssize_t args, Step *to) {
  PyObject *launch, *ranges, *grid, *sources;
  if (!PyArg_ParseTuple(from, "O!O!OO!", &launch_type, &launch, &PyTuple_Type, &ranges, &grid, &PyTuple_Type, &sources)) return 0;
  Launch *kernel = (Launch *)launch;
  to->ranges = (int)PyTuple_GET_SIZE(ranges);
  if (to->ranges > RANGES || PyTuple_GET_SIZE(sources) != kernel->count || !size_of(grid, args, &to->grid)) return 0;
  for (int i = 0; i < to->ranges; i++) {
    long long low, high;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(ranges, i), "iLL", &to->range[i].arg, &low, &high)) return 0;
    to->range[i].low = low;
    to->range[i].high = high;
    if (to->range[i].arg < 0 || to->range[i].arg >= args) return 0;
  }
  for (Py_ssize_t i = 0; i < kernel->count; i++) {
    PyObject *s = PyTuple_GET_ITEM(sources, i);
    Source *source = &to->sources[i];
    int device = -1;
    if (!PyTuple_Check(s)) {
      source->kind = 'c';
      if (!read_argument(kernel->params[i], s, &source->key, &source->value, &device) || device >= 0) return 0;
      continue;
    }
    PyObject *of;
    int kind;
    if (!PyArg_ParseTuple(s, "CO", &kind, &of)) return 0;
    source->kind = (char)kind;
    if (kind == 'a') {
      source->arg = (int)PyLong_AsLong(of);
      if (source->arg < 0 || source->arg >= args) return 0;
    } else if (!size_of(of, args, &source->size)) {
      return 0;
    }
  }
  to->launch = (Launch *)Py_NewRef(launch);
  return 1;
}

static void drop(Plan *plan) {
  for (int i = 0; i < plan->count; i++) Py_XDECREF(plan->steps[i].launch);
  PyMem_Free(plan->steps);
  PyMem_Free(plan);
}

static void drop_all(Plans *self) {
  for (int b = 0; b < BUCKETS; b++) {
    Plan *p = self->buckets[b];
    self->buckets[b] = NULL;
    for (Plan *next; p != NULL; p = next) { next = p->next; drop(p); }
  }
  self->plans = 0;
}

/* learn(args, steps, scratch): do this for such a call from now on. */
static PyObject *learn(PyObject *object, PyObject *given) {
  Plans *self = (Plans *)object;
  PyObject *args, *steps, *scratch;
  Call call;
  if (!PyArg_ParseTuple(given, "O!O!O", &PyTuple_Type, &args, &PyTuple_Type, &steps, &scratch)) return NULL;
  if (PyTuple_GET_SIZE(args) != self->count || PyTuple_GET_SIZE(steps) > STEPS
      || !read_call(self, &PyTuple_GET_ITEM(args, 0), &call) || plan_of(self, &call) != NULL) { PyErr_Clear(); Py_RETURN_FALSE; }
  Plan *plan = PyMem_Calloc(1, sizeof(Plan) + sizeof(int64_t) * call.words);
  if (plan == NULL) return PyErr_NoMemory();
  plan->steps = PyMem_Calloc(STEPS, sizeof(Step));
  int good = plan->steps != NULL;
  plan->scratched = scratch != Py_None;
  if (good && plan->scratched) good = size_of(scratch, self->count, &plan->scratch);
  for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(steps); i++)
    if ((good = step_of(PyTuple_GET_ITEM(steps, i), self->count, &plan->steps[i]))) plan->count++;
  if (!good) {
    drop(plan);
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (self->plans >= PLANS) drop_all(self);
  plan->hash = call.hash;
  plan->words = call.words;
  memcpy(plan->key, call.key, sizeof(int64_t) * call.words);
  plan->next = self->buckets[call.hash % BUCKETS];
  self->buckets[call.hash % BUCKETS] = plan;
  self->plans++;
  Py_RETURN_TRUE;
}

/* lend(device, stream, elements, address): the scratch of a stream from now on. */
static PyObject *lend(PyObject *object, PyObject *given) {
  Plans *self = (Plans *)object;
  int device;
  unsigned long long stream, at;
  long long size;
  if (!PyArg_ParseTuple(given, "iKLK", &device, &stream, &size, &at)) return NULL;
  Scratch *s = self->scratch;
  while (s != NULL && !(s->device == device && s->stream == (void *)(uintptr_t)stream)) s = s->next;
  if (s == NULL) {
    if ((s = PyMem_Calloc(1, sizeof(Scratch))) == NULL) return PyErr_NoMemory();
    s->next = self->scratch;
    self->scratch = s;
  }
  *s = (Scratch){s->next, device, (void *)(uintptr_t)stream, size, at};
  Py_RETURN_NONE;
}

static int plans_init(PyObject *object, PyObject *given, PyObject *names) {
  Plans *self = (Plans *)object;
  PyObject *slow;
  Py_ssize_t count;
  (void)names;
  if (!PyArg_ParseTuple(given, "On", &slow, &count)) return -1;
  if (count < 1 || count > ARGUMENTS) { PyErr_Format(PyExc_ValueError, "hal: at most %d arguments", (int)ARGUMENTS); return -1; }
  if (self->call != NULL) { PyErr_SetString(PyExc_TypeError, "hal: plans are made once"); return -1; }
  self->slow = Py_NewRef(slow);
  self->count = count;
  self->call = warm;
  return 0;
}

static int plans_traverse(PyObject *object, visitproc visit, void *arg) {
  Plans *self = (Plans *)object;
  Py_VISIT(self->slow);
  for (int b = 0; b < BUCKETS; b++)
    for (Plan *p = self->buckets[b]; p != NULL; p = p->next)
      for (int i = 0; i < p->count; i++) Py_VISIT(p->steps[i].launch);
  return 0;
}

static int plans_clear(PyObject *object) {
  Plans *self = (Plans *)object;
  self->call = NULL;
  Py_CLEAR(self->slow);
  drop_all(self);
  return 0;
}

static void plans_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  plans_clear(object);
  for (Scratch *s = ((Plans *)object)->scratch, *next; s != NULL; s = next) { next = s->next; PyMem_Free(s); }
  Py_TYPE(object)->tp_free(object);
}

static PyMethodDef plans_methods[] = {
  {"learn", learn, METH_VARARGS, NULL}, {"lend", lend, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyTypeObject plans_type = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "hal.triton._launch.Plans", .tp_basicsize = sizeof(Plans), .tp_new = PyType_GenericNew,
  .tp_init = plans_init, .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
  .tp_traverse = plans_traverse, .tp_clear = plans_clear, .tp_dealloc = plans_dealloc, .tp_methods = plans_methods,
  .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Plans, call),
};

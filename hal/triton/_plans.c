/* A warm call of an op, from its arguments to its launches: part of _launch.c.

   A plan is found by the words that _call.c reads off a call; pointers, first sizes and floats go where the plan says.
   Whatever is not known, or not as before, is for `slow`, with the call as it was read. */

enum { STEPS = 16, NUMBERS = 128, RANGES = 3, BUCKETS = 256, PLANS = 4096 };

typedef struct { int op; int64_t a, b; } Number;       /* a constant, a length, or of two numbers before it */
typedef struct { char kind; int at; uint32_t key; Value value; } Source;   /* a constant, arg, number, scratch */
typedef struct { Launch *launch; int ranges; struct { int arg; int64_t low, high; } range[RANGES]; int grid;
                 Source sources[MOST]; } Step;
typedef struct Plan { struct Plan *next; uint64_t hash; size_t words; int count, numbers, scratch, as_graph, returns;
                      int64_t last, first; PyObject *dtype, *sizes, *strides; Step *steps; Number number[NUMBERS];
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

/* The pairs of launches that share a scratch: another thread's must not come in between. */
static pthread_mutex_t pairs = PTHREAD_MUTEX_INITIALIZER;

static Plan *plan_of(Plans *self, const Call *call) {
  for (Plan *p = self->buckets[call->hash % BUCKETS]; p != NULL; p = p->next)
    if (p->hash == call->hash && p->words == call->words && memcmp(p->key, call->key, sizeof(int64_t) * p->words) == 0)
      return p;
  return NULL;
}

/* All numbers of a plan. What is divided by 0 or shifted out of 64 bits belongs to no launch that is due. */
static void compute(const Plan *plan, const Call *call, int64_t *to) {
  for (int i = 0; i < plan->numbers; i++) {
    const Number *n = &plan->number[i];
    int64_t a = n->a, b = n->b;
    if (n->op == 'n') { to[i] = a; continue; }
    if (n->op == 'l') { to[i] = call->args[a].length; continue; }
    a = to[a], b = to[b];
    switch (n->op) {
      case '+': to[i] = a + b; break;
      case '*': to[i] = (int64_t)((uint64_t)a * (uint64_t)b); break;
      case '/': to[i] = b > 0 ? a / b : 0; break;
      case 'u': to[i] = b > 0 ? (a + b - 1) / b : 0; break;
      case '<': to[i] = a < b ? a : b; break;
      case '>': to[i] = a > b ? a : b; break;
      case 's': to[i] = b >= 0 && b < 63 ? (int64_t)((uint64_t)a << b) : 0; break;
      default: to[i] = a > 0 ? 63 - __builtin_clzll((uint64_t)a) : 0;
    }
  }
}

static uint64_t scratch_of(Plans *self, int device, void *stream, int64_t size) {
  int capturing;
  if (captures((CUstream)stream, &capturing) != CUDA_SUCCESS || capturing) return 0;
  for (Scratch *s = self->scratch; s != NULL; s = s->next)
    if (s->device == device && s->stream == stream) return s->size >= size ? s->at : 0;
  return 0;
}

/* A kernel's arguments by their sources. */
static void take(const Step *step, const Call *call, const int64_t *numbers, uint64_t scratch, uint32_t *key, Value *values) {
  for (Py_ssize_t i = 0; i < step->launch->count; i++) {
    const Source *s = &step->sources[i];
    uint8_t param = step->launch->params[i];
    switch (s->kind) {
      case 'c': key[i] = s->key; values[i] = s->value; break;
      case 'a': key[i] = call->args[s->at].key;
                if (key[i] >> 28 == POINTER >> 28 && !(param & SPECIALISED)) key[i] |= 1;
                values[i] = call->args[s->at].value;
                break;
      case 's': values[i].i = numbers[s->at]; key[i] = integer(param, values[i].i); break;
      default: values[i].u = scratch + 4u * (uint64_t)numbers[s->at];
               key[i] = POINTER | 2u << 12 | 32u << 4 | (!(param & SPECIALISED) || (values[i].u & 15) == 0);
    }
  }
}

/* What a new tensor like an argument is made from: contiguous, its last size the plan's. */
static int shape(Plan *plan, PyObject *like, int64_t first) {
  Tensor t;
  int64_t step = 1;
  if (exchange->read(like, &t) != 0) return 0;
  if (plan->dtype == Py_None) {
    PyObject *dtype = PyObject_GetAttr(like, s_dtype);
    if (dtype == NULL) return 0;
    Py_SETREF(plan->dtype, dtype);
  }
  PyObject *sizes = PyTuple_New(t.ndim), *strides = PyTuple_New(t.ndim);
  for (int i = t.ndim - 1; sizes != NULL && strides != NULL && i >= 0; i--) {
    int64_t size = i == t.ndim - 1 && plan->last >= 0 ? plan->last : t.shape[i];
    PyTuple_SET_ITEM(sizes, i, PyLong_FromLongLong(size));
    PyTuple_SET_ITEM(strides, i, PyLong_FromLongLong(step));
    step *= size > 0 ? size : 1;
  }
  Py_XSETREF(plan->sizes, sizes);
  Py_XSETREF(plan->strides, strides);
  plan->first = first;
  return sizes != NULL && strides != NULL;
}

/* A new tensor like an argument; read into the last of the call's arguments. Calls of a plan differ in its first size. */
static PyObject *allocate(Plan *plan, PyObject *like, int64_t first, Given *to) {
  Tensor t;
  if ((plan->sizes == NULL || plan->strides == NULL || plan->first != first) && !shape(plan, like, first)) return NULL;
  PyObject *args[] = {Py_NewRef(plan->sizes), Py_NewRef(plan->strides), Py_NewRef(plan->dtype)};
  PyObject *made = PyObject_Vectorcall(empty_strided, args, 3, NULL);
  for (int i = 0; i < 3; i++) Py_DECREF(args[i]);
  if (made != NULL && (!is_tensor(made) || exchange->read(made, &t) != 0)) Py_CLEAR(made);
  if (made != NULL) pointer_of(&t, to);
  return made;
}

/* Starts what the call's plan says. NULL without an error: there is none, or not to be started here. */
static PyObject *start_plan(Plans *self, PyObject *const *args, Call *call) {
  Started all[STEPS];
  int count = 0;
  void *stream;
  uint64_t scratch = 0;
  int64_t numbers[NUMBERS];
  CUdevice now;
  PyObject *found = NULL;
  Plan *plan = plan_of(self, call);
  if (plan == NULL || current_device(&now) != CUDA_SUCCESS || now != call->device
      || exchange->stream(device_type, call->device, &stream) != 0) goto none;
  compute(plan, call, numbers);
  if (plan->scratch >= 0 && (scratch = scratch_of(self, call->device, stream, numbers[plan->scratch])) == 0) goto none;
  found = plan->returns < 0 ? Py_None : args[plan->returns];
  if (plan->last) found = allocate(plan, found, call->args[plan->returns].length, &call->args[self->count]);
  else Py_INCREF(found);
  if (found == NULL) goto none;
  for (int i = 0; i < plan->count; i++) {
    const Step *step = &plan->steps[i];
    int within = 1;
    for (int r = 0; r < step->ranges; r++) {
      int64_t length = call->args[step->range[r].arg].length;
      within &= length > step->range[r].low && length <= step->range[r].high;
    }
    int64_t grid = numbers[step->grid];
    if (!within || grid == 0) continue;
    uint32_t key[MOST];
    Started *s = &all[count++];
    take(step, call, numbers, scratch, key, s->values);
    if (grid < 0 || grid > INT32_MAX || !ready(step->launch, key, call->device, s)) goto none;
    s->grid[0] = (unsigned)grid;
    s->grid[1] = s->grid[2] = 1;
  }
  /* With scratch, which a captured graph gets from Python, nothing is captured here. */
  int at_once = plan->scratch >= 0 && plan->as_graph >= 0 && numbers[plan->as_graph] > 0;
  if (!begin(all, count, stream, plan->scratch >= 0 ? &pairs : NULL, at_once ? call->device : -1)) Py_CLEAR(found);
  return found;
none:
  Py_XDECREF(found);
  PyErr_Clear();
  return NULL;
}

/* By the plan, or else by `slow`, which gets the call, or None where it can't be read, and the arguments. */
static PyObject *by_plan(Plans *self, PyObject *const *args, Call *call) {
  PyObject *all[1 + ARGUMENTS], *done = call == NULL ? NULL : start_plan(self, args, call);
  if (done != NULL || PyErr_Occurred()) return done;
  all[0] = call == NULL ? Py_None : (PyObject *)call;
  memcpy(all + 1, args, sizeof(PyObject *) * (size_t)self->count);
  return PyObject_Vectorcall(self->slow, all, 1 + (size_t)self->count, NULL);
}

static PyObject *warm(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names) {
  Plans *self = (Plans *)object;
  if (names != NULL || PyVectorcall_NARGS(nargsf) != self->count)
    return PyErr_Format(PyExc_TypeError, "hal: %zd arguments by position expected", self->count);
  Call *call = call_new();
  if (call == NULL) return NULL;
  int known = 1;
  call->signs = 0;
  call->words = 1;
  call->device = -1;
  for (Py_ssize_t n = 0; known && n < self->count; n++) {
    Tensor t;
    int tensor = is_tensor(args[n]);
    known = (!tensor || exchange->read(args[n], &t) == 0) && plan_argument(call, n, args[n], tensor ? &t : NULL);
  }
  PyErr_Clear();
  PyObject *done = by_plan(self, args, known && plan_end(call) ? call : NULL);
  Py_DECREF(call);
  return done;
}

/* handed(call, *args): the same of a call that a signer has read. */
static PyObject *handed(PyObject *object, PyObject *const *args, Py_ssize_t count) {
  Plans *self = (Plans *)object;
  if (count == 1 + self->count && Py_TYPE(args[0]) == &call_type && ((Call *)args[0])->words != 0)
    return by_plan(self, args + 1, (Call *)args[0]);
  return warm(object, args + 1, (size_t)(count - 1), NULL);
}

/* ((op, a, b), ...) as a plan's numbers, each of those before it. */
static int numbers_of(PyObject *from, Py_ssize_t args, Plan *to) {
  if (PyTuple_GET_SIZE(from) > NUMBERS) return 0;
  for (to->numbers = 0; to->numbers < PyTuple_GET_SIZE(from); to->numbers++) {
    Number *n = &to->number[to->numbers];
    long long a, b;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(from, to->numbers), "CLL", &n->op, &a, &b) || strchr("nl+*/u<>sg", n->op) == NULL)
      return 0;
    n->a = a, n->b = b;
    if (n->op != 'n' && (a < 0 || b < 0 || a >= (n->op == 'l' ? args : to->numbers) || b >= (n->op == 'l' ? 1 : to->numbers)))
      return 0;
  }
  return 1;
}

/* (launch, ranges, grid, sources) as a step. */
static int step_of(PyObject *from, Py_ssize_t args, int numbers, Step *to) {
  PyObject *launch, *ranges, *sources;
  if (!PyArg_ParseTuple(from, "O!O!iO!", &launch_type, &launch, &PyTuple_Type, &ranges, &to->grid, &PyTuple_Type, &sources)) return 0;
  Launch *kernel = (Launch *)launch;
  to->ranges = (int)PyTuple_GET_SIZE(ranges);
  if (to->ranges > RANGES || PyTuple_GET_SIZE(sources) != kernel->count || to->grid < 0 || to->grid >= numbers) return 0;
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
    int kind;
    if (!PyArg_ParseTuple(s, "Ci", &kind, &source->at) || source->at < 0) return 0;
    if (kind == 'a' ? source->at > args : source->at >= numbers) return 0;
    source->kind = (char)kind;
  }
  to->launch = (Launch *)Py_NewRef(launch);
  return 1;
}

static void drop(Plan *plan) {
  for (int i = 0; i < plan->count; i++) Py_XDECREF(plan->steps[i].launch);
  Py_XDECREF(plan->dtype);
  Py_XDECREF(plan->sizes);
  Py_XDECREF(plan->strides);
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

/* learn(call, numbers, steps, scratch, as_graph, returns, last, dtype): do this for such a call from now on. Which
   number its scratch is, and which says by being above 0 that launches are begun as a graph (-1: none). It returns an
   argument (-1: None), or, where `last` is not 0, a new tensor like it, its last size `last` (-1: the same), its dtype
   another or None. */
static PyObject *learn(PyObject *object, PyObject *given) {
  Plans *self = (Plans *)object;
  PyObject *read, *numbers, *steps, *dtype;
  int scratch, as_graph, returns;
  long long last;
  if (!PyArg_ParseTuple(given, "O!O!O!iiiLO", &call_type, &read, &PyTuple_Type, &numbers, &PyTuple_Type, &steps, &scratch,
                        &as_graph, &returns, &last, &dtype)) return NULL;
  const Call *call = (Call *)read;
  if (PyTuple_GET_SIZE(steps) > STEPS || call->words == 0 || returns >= self->count || plan_of(self, call) != NULL)
    Py_RETURN_FALSE;
  Plan *plan = PyMem_Calloc(1, sizeof(Plan) + sizeof(int64_t) * call->words);
  if (plan == NULL) return PyErr_NoMemory();
  plan->steps = PyMem_Calloc(STEPS, sizeof(Step));
  plan->returns = returns;
  plan->last = last;
  plan->dtype = Py_NewRef(dtype);
  plan->scratch = scratch;
  plan->as_graph = as_graph;
  int good = plan->steps != NULL && numbers_of(numbers, self->count, plan) && scratch < plan->numbers
             && as_graph < plan->numbers;
  for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(steps); i++)
    if ((good = step_of(PyTuple_GET_ITEM(steps, i), self->count, plan->numbers, &plan->steps[i]))) plan->count++;
  if (!good) {
    drop(plan);
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (self->plans >= PLANS) drop_all(self);
  plan->hash = call->hash;
  plan->words = call->words;
  memcpy(plan->key, call->key, sizeof(int64_t) * call->words);
  plan->next = self->buckets[call->hash % BUCKETS];
  self->buckets[call->hash % BUCKETS] = plan;
  self->plans++;
  Py_RETURN_TRUE;
}

static PyObject *forget(PyObject *object, PyObject *unused) {
  (void)unused;
  drop_all((Plans *)object);
  Py_RETURN_NONE;
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
  {"learn", learn, METH_VARARGS, NULL}, {"lend", lend, METH_VARARGS, NULL}, {"forget", forget, METH_NOARGS, NULL},
  {"handed", (PyCFunction)(void (*)(void))handed, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static PyTypeObject plans_type = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "hal.triton._launch.Plans", .tp_basicsize = sizeof(Plans), .tp_new = PyType_GenericNew,
  .tp_init = plans_init, .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
  .tp_traverse = plans_traverse, .tp_clear = plans_clear, .tp_dealloc = plans_dealloc, .tp_methods = plans_methods,
  .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Plans, call),
};

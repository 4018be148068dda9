/* The warm path of hal/triton/launch.py: from a call's arguments to cuLaunchKernelEx. Part of hal/ops/_call.c.

   Tensors are read through DLPack's exchange interface (torch 2.10 and later), by which a pointer, a dtype and a
   device cost no Python call. What this file doesn't know (a form not compiled yet, a hook, another context, an
   argument of another kind) goes to `slow`, Triton's own launch, which keeps every rule; this one only skips work. */

/* Of cuda.h, which not every machine has. */
typedef int CUresult, CUdevice;
typedef void *CUfunction, *CUstream;
enum { CUDA_SUCCESS = 0, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
typedef struct { int id; char pad[4]; union { char all[64]; int allowed; } value; } CUlaunchAttribute;
typedef struct { _Alignas(64) unsigned char all[128]; } CUtensorMap;
typedef struct { unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
                 CUstream hStream; CUlaunchAttribute *attrs; unsigned numAttrs; } CUlaunchConfig;

enum { MOST = 64 };
enum { SPECIALISED = 1, TYPED = 2 };              /* a parameter's bits */
enum { WIDE = 2 << 4 };                           /* in an integer's key: u64 */

static CUresult (*start)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*current_device)(CUdevice *);
static CUresult (*encode)(CUtensorMap *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                          const uint32_t *, int, int, int, int);
static CUresult (*captures)(CUstream, int *);
static PyObject *runtime, *compilation, *enter, *leave, *empty_strided;
static PyObject *s_enter, *s_leave, *s_calls, *s_debug, *s_instrumentation, *s_dtype;

/* Rows of an argument, by which the copy engine reads boxes of them: which argument, those with the number of rows and
   what lies between them, times how many bytes, or elements, which rows of 0 columns have all; and what cuda.h has
   names for. */
typedef struct { int of, rows, stride, type, swizzle; int64_t bytes, unit, columns; uint32_t box[2]; } Map;
enum { MAPS = 2 };                                /* of a kernel */

typedef struct Form {                              /* a compiled kernel */
  struct Form *next;
  CUfunction function;
  unsigned threads, shared;
  int pdl, device;
  int mapped;                                      /* how many maps follow the arguments */
  Map maps[MAPS];
  uint32_t key[MOST];
  char codes[MOST];                                /* how each argument is passed; '-': it is compiled in */
} Form;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *slow, *pre_run, *globals;               /* globals: (name, value that is compiled in, dict) */
  Form *forms;                                     /* the last one started comes first */
  Py_ssize_t count;
  uint8_t params[MOST];
} Launch;

/* What an int adds to a key. */
static uint32_t integer(uint8_t param, int64_t v) {
  uint32_t class = param & SPECIALISED ? (v == 1 ? 1 : (v & 15) == 0 ? 2 : 0) : 0;
  return INT | class | (param & TYPED || (v >= INT32_MIN && v <= INT32_MAX) ? 0u : 1u << 4);
}

/* An argument as a value and as its part of the key: all that Triton specialises on. 0: not for this path. */
static int read_argument(uint8_t param, PyObject *a, uint32_t *key, Value *value, int *device) {
  PyTypeObject *type = Py_TYPE(a);
  if (is_tensor(a)) {
    Tensor t;
    if (exchange->read(a, &t) != 0) { PyErr_Clear(); return 0; }
    if (t.device.type != device_type || (*device >= 0 && t.device.id != *device)) return 0;
    *device = t.device.id;
    value->u = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    int aligned = !(param & SPECIALISED) || (value->u & 15) == 0;
    *key = POINTER | (uint32_t)t.dtype.code << 12 | (uint32_t)t.dtype.bits << 4 | (uint32_t)aligned;
  } else if (type == &PyLong_Type) {
    int over;
    value->i = PyLong_AsLongLongAndOverflow(a, &over);
    *key = integer(param, value->i);
    if (over) {
      if (over < 0 || (param & TYPED)) return 0;
      value->u = PyLong_AsUnsignedLongLong(a);
      if (PyErr_Occurred()) { PyErr_Clear(); return 0; }
      *key = INT | WIDE | (param & SPECIALISED && (value->u & 15) == 0 ? 2u : 0u);
    }
  } else if (a == Py_None) {
    value->u = 0;
    *key = NONE;
  } else if (type == &PyBool_Type) {
    value->u = a == Py_True;
    *key = BOOL;
  } else if (type == &PyFloat_Type) {
    value->d = PyFloat_AS_DOUBLE(a);
    *key = FLOAT;
  } else {
    return 0;
  }
  return 1;
}

static int read_arguments(Launch *self, PyObject *const *args, uint32_t *key, Value *values, int *device) {
  *device = -1;
  for (Py_ssize_t n = 0; n < self->count; n++)
    if (!read_argument(self->params[n], args[n], &key[n], &values[n], device)) return 0;
  return *device >= 0;
}

/* The value for a parameter that is a float, to which Python's numbers of every kind may be given. */
static double number(const Value *v, uint32_t key) {
  if (key >= INT) return (key & WIDE) == WIDE ? (double)v->u : (double)v->i;
  return key == BOOL ? (double)v->u : v->d;
}

/* 1: what `key` says of an argument can be passed as `code`. */
static int passes(uint32_t key, char code) {
  switch (code) {
    case '-': return 1;
    case 'p': return key >> 28 == POINTER >> 28;
    case 'f': case 'd': return key == FLOAT || key == BOOL || key >= INT;
    case 'i': case 'l': case 'b': return key == BOOL || key >= INT;
    default: return 0;
  }
}

static Form *find(Launch *self, const uint32_t *key, int device) {
  for (Form **at = &self->forms, *f; (f = *at) != NULL; at = &f->next) {
    if (f->device == device && memcmp(f->key, key, sizeof(uint32_t) * (size_t)self->count) == 0) {
      *at = f->next;
      f->next = self->forms;
      self->forms = f;
      return f;
    }
  }
  return NULL;
}

/* 1: the attribute is `want`, and its list `calls` is empty. */
static int quiet(PyObject *name, PyObject *want) {
  PyObject *found = PyObject_GetAttr(runtime, name);
  if (found != want) { Py_XDECREF(found); return 0; }
  PyObject *calls = PyObject_GetAttr(found, s_calls);
  int none = calls != NULL && PyList_CheckExact(calls) && PyList_GET_SIZE(calls) == 0;
  Py_XDECREF(calls);
  Py_DECREF(found);
  return none;
}

static int off(PyObject *of, PyObject *name) {
  PyObject *found = PyObject_GetAttr(of, name);
  int truth = found == NULL ? 1 : PyObject_IsTrue(found);
  Py_XDECREF(found);
  return truth == 0;
}

/* Nobody wants to see this launch, and what is compiled in is as it was. */
static int undisturbed(Launch *self) {
  if (!(quiet(s_enter, enter) && quiet(s_leave, leave) && off(runtime, s_debug) && off(compilation, s_instrumentation)
        && PyList_GET_SIZE(self->pre_run) == 0)) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->globals); i++) {
    PyObject *used = PyTuple_GET_ITEM(self->globals, i);
    if (PyDict_GetItemWithError(PyTuple_GET_ITEM(used, 2), PyTuple_GET_ITEM(used, 0)) != PyTuple_GET_ITEM(used, 1)) return 0;
  }
  return 1;
}

/* A launch that needs nothing of Python any more: `values` are in the places that `params` say. */
typedef struct { CUfunction function; unsigned grid[3], threads, shared; int pdl; Value values[MOST];
                 void *params[MOST + 5 * MAPS + 2];
                 struct { CUtensorMap map; int32_t shape[2]; int64_t strides[2]; } maps[MAPS]; } Started;

/* A map of rows, as the driver makes it, and what Triton passes behind one. 0: the driver makes none. */
static int mapped(const Map *map, Started *to, int which, int n) {
  enum { FILL_WITH_ZEROS = 0, ALL_ELEMENTS = 0, PROMOTED_TO_128_BYTES = 2 };
  int64_t rows = to->values[map->rows].i, between = to->values[map->stride].i;
  int64_t columns = map->columns ? map->columns : between * map->unit;
  uint64_t sizes[2] = {(uint64_t)columns, (uint64_t)rows}, strides[1] = {(uint64_t)(between * map->bytes)};
  uint32_t steps[2] = {1, 1};
  CUtensorMap *made = &to->maps[which].map;
  int32_t *shape = to->maps[which].shape;
  int64_t *apart = to->maps[which].strides;
  memset(made, 0, sizeof *made);
  /* Of no rows no box is read. */
  if (rows > 0 && encode(made, map->type, 2, (void *)(uintptr_t)to->values[map->of].u, sizes, strides, map->box, steps,
                         ALL_ELEMENTS, map->swizzle, PROMOTED_TO_128_BYTES, FILL_WITH_ZEROS) != CUDA_SUCCESS) return 0;
  shape[0] = (int32_t)rows;
  shape[1] = (int32_t)columns;
  apart[0] = between;
  apart[1] = 1;
  void *all[] = {made, &shape[0], &shape[1], &apart[0], &apart[1]};
  memcpy(to->params + n, all, sizeof all);
  return 1;
}

/* 0: no compiled kernel is known for such arguments, or not to be started here. */
static int ready(Launch *self, const uint32_t *key, int device, Started *to) {
  static void *scratch = NULL;
  Form *form = find(self, key, device);
  if (form == NULL || !undisturbed(self)) return 0;
  int n = 0;
  for (Py_ssize_t i = 0; i < self->count; i++) {
    Value *v = &to->values[i];
    switch (form->codes[i]) {
      case '-': continue;
      case 'i': if (v->i < INT32_MIN || v->i > INT32_MAX) return 0; v->w = (int32_t)v->i; break;
      case 'f': v->f = (float)number(v, key[i]); break;
      case 'd': v->d = number(v, key[i]); break;
      case 'b': if (v->u > 1) return 0; v->b = (uint8_t)v->u; break;
      default: break;                              /* 8 bytes as they are */
    }
    to->params[n++] = v;
  }
  for (int i = 0; i < form->mapped; i++, n += 5)
    if (!mapped(&form->maps[i], to, i, n)) return 0;
  to->params[n++] = &scratch;
  to->params[n++] = &scratch;
  to->function = form->function;
  to->threads = form->threads;
  to->shared = form->shared;
  to->pdl = form->pdl;
  return 1;
}

#include "_graphs.c"

/* 0: it failed, and says so. `as_graph`: the device, where they may be begun at once, else -1. */
static int begin(Started *all, int count, void *stream, pthread_mutex_t *together, int as_graph) {
  CUlaunchAttribute attribute;
  memset(&attribute, 0, sizeof attribute);
  attribute.id = PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.allowed = 1;
  CUresult code = CUDA_SUCCESS;
  const char *what = "cuLaunchKernelEx";
  Py_BEGIN_ALLOW_THREADS
  if (together != NULL) pthread_mutex_lock(together);
  if (as_graph >= 0 && begin_as_graph(all, count, as_graph, stream, &code)) { what = "cuGraphLaunch"; count = 0; }
  for (Started *s = all; s < all + count && code == CUDA_SUCCESS; s++) {
    CUlaunchConfig config = {
      .gridDimX = s->grid[0], .gridDimY = s->grid[1], .gridDimZ = s->grid[2], .blockDimX = s->threads, .blockDimY = 1,
      .blockDimZ = 1, .sharedMemBytes = s->shared, .hStream = (CUstream)stream, .attrs = &attribute,
      .numAttrs = (unsigned)s->pdl,
    };
    code = start(&config, s->function, s->params, NULL);
  }
  if (together != NULL) pthread_mutex_unlock(together);
  Py_END_ALLOW_THREADS
  if (code != CUDA_SUCCESS) PyErr_Format(PyExc_RuntimeError, "hal: %s: error %d", what, (int)code);
  return code == CUDA_SUCCESS;
}

static int grid_of(PyObject *grid, unsigned out[3]) {
  if (!PyTuple_CheckExact(grid) || PyTuple_GET_SIZE(grid) < 1 || PyTuple_GET_SIZE(grid) > 3) return 0;
  out[1] = out[2] = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grid); i++) {
    int over;
    long v = PyLong_Check(PyTuple_GET_ITEM(grid, i)) ? PyLong_AsLongAndOverflow(PyTuple_GET_ITEM(grid, i), &over) : -1;
    if (v < 0 || v > INT32_MAX) return 0;
    out[i] = (unsigned)v;
  }
  return 1;
}

static PyObject *call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names) {
  Launch *self = (Launch *)object;
  uint32_t key[MOST];
  Started s;
  int device;
  CUdevice now;
  void *stream;
  if (names != NULL || PyVectorcall_NARGS(nargsf) != self->count + 1 || !grid_of(args[0], s.grid)
      || !read_arguments(self, args + 1, key, s.values, &device) || current_device(&now) != CUDA_SUCCESS || now != device
      || !ready(self, key, device, &s)) goto slow;
  if (s.grid[0] == 0 || s.grid[1] == 0 || s.grid[2] == 0) Py_RETURN_NONE;
  if (exchange->stream(device_type, device, &stream) == 0) return begin(&s, 1, stream, NULL, -1) ? Py_NewRef(Py_None) : NULL;
slow:
  PyErr_Clear();
  return PyObject_Vectorcall(self->slow, args, nargsf, names);
}

/* add(args, function, warps, shared, pdl, codes, maps = ()): start this function for such arguments from now on. */
static PyObject *add(PyObject *object, PyObject *given) {
  Launch *self = (Launch *)object;
  PyObject *args;
  unsigned long long function;
  int warps, shared, pdl, device;
  const char *codes;
  Py_ssize_t length;
  PyObject *rows = NULL;
  Map maps[MAPS] = {0};
  uint32_t key[MOST];
  Value values[MOST];
  if (!PyArg_ParseTuple(given, "O!Kiips#|O!", &PyTuple_Type, &args, &function, &warps, &shared, &pdl, &codes, &length,
                        &PyTuple_Type, &rows)) return NULL;
  Py_ssize_t mapped = rows == NULL ? 0 : PyTuple_GET_SIZE(rows);
  if (mapped > MAPS) return PyErr_Format(PyExc_ValueError, "hal: at most %d maps expected, got %zd", (int)MAPS, mapped);
  for (Map *m = maps; m < maps + mapped; m++) {
    PyObject *row = PyTuple_GET_ITEM(rows, m - maps);
    if (!PyTuple_Check(row))
      return PyErr_Format(PyExc_TypeError, "hal: a map is a tuple of ten integers; got %.100s", Py_TYPE(row)->tp_name);
    if (!PyArg_ParseTuple(row, "iiiiiLLLII", &m->of, &m->rows, &m->stride, &m->type, &m->swizzle, &m->bytes, &m->unit,
                          &m->columns, &m->box[0], &m->box[1])) return NULL;
  }
  if (PyTuple_GET_SIZE(args) != self->count || length != self->count)
    return PyErr_Format(PyExc_TypeError, "hal: %zd arguments expected", self->count);
  if (!read_arguments(self, &PyTuple_GET_ITEM(args, 0), key, values, &device) || find(self, key, device) != NULL)
    Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < length; i++)
    if (!passes(key[i], codes[i])) Py_RETURN_FALSE;
  for (Map *m = maps; m < maps + mapped; m++) {
    int places[] = {m->of, m->rows, m->stride};
    for (int i = 0; i < 3; i++)
      if (encode == NULL || places[i] < 0 || places[i] >= length || codes[places[i]] != (i == 0 ? 'p' : 'l')) Py_RETURN_FALSE;
  }
  Form *form = PyMem_Calloc(1, sizeof(Form));
  if (form == NULL) return PyErr_NoMemory();
  form->function = (CUfunction)(uintptr_t)function;
  form->threads = 32u * (unsigned)warps;
  form->shared = (unsigned)shared;
  form->pdl = pdl;
  form->device = device;
  form->mapped = (int)mapped;
  memcpy(form->maps, maps, sizeof maps);
  memcpy(form->key, key, sizeof(uint32_t) * (size_t)self->count);
  memcpy(form->codes, codes, (size_t)length);
  form->next = self->forms;
  self->forms = form;
  Py_RETURN_TRUE;
}

static int init(PyObject *object, PyObject *given, PyObject *names) {
  Launch *self = (Launch *)object;
  PyObject *slow, *pre_run, *globals;
  const char *params;
  Py_ssize_t length;
  if (names != NULL && PyDict_GET_SIZE(names) != 0) {
    PyErr_SetString(PyExc_TypeError, "hal: a launch takes no keyword arguments");
    return -1;
  }
  if (!PyArg_ParseTuple(given, "Oy#O!O!", &slow, &params, &length, &PyList_Type, &pre_run, &PyTuple_Type, &globals)) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(globals); i++) {
    PyObject *used = PyTuple_GET_ITEM(globals, i);
    if (!PyTuple_Check(used) || PyTuple_GET_SIZE(used) != 3 || !PyDict_Check(PyTuple_GET_ITEM(used, 2))) {
      PyErr_SetString(PyExc_TypeError, "hal: a global is (name, value, dict)");
      return -1;
    }
  }
  if (length > MOST) {
    PyErr_Format(PyExc_ValueError, "hal: at most %d arguments expected, got %zd", (int)MOST, length);
    return -1;
  }
  /* Its forms are keyed by as many arguments as it was made with. */
  if (self->call != NULL) { PyErr_SetString(PyExc_TypeError, "hal: a launch is made once"); return -1; }
  self->slow = Py_NewRef(slow);
  self->pre_run = Py_NewRef(pre_run);
  self->globals = Py_NewRef(globals);
  self->count = length;
  memcpy(self->params, params, (size_t)length);
  self->call = call;
  return 0;
}

static int traverse(PyObject *object, visitproc visit, void *arg) {
  Launch *self = (Launch *)object;
  Py_VISIT(self->slow); Py_VISIT(self->pre_run); Py_VISIT(self->globals);
  return 0;
}

static int clear(PyObject *object) {
  Launch *self = (Launch *)object;
  self->call = NULL;                               /* what still reaches it is told that it can't be called */
  Py_CLEAR(self->slow); Py_CLEAR(self->pre_run); Py_CLEAR(self->globals);
  return 0;
}

static void dealloc(PyObject *object) {
  Launch *self = (Launch *)object;
  PyObject_GC_UnTrack(object);
  clear(object);
  for (Form *f = self->forms, *next; f != NULL; f = next) { next = f->next; PyMem_Free(f); }
  Py_TYPE(object)->tp_free(object);
}

static PyMethodDef methods[] = {{"add", add, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyTypeObject launch_type = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "hal.triton._launch.Launch", .tp_basicsize = sizeof(Launch), .tp_new = PyType_GenericNew, .tp_init = init,
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, .tp_traverse = traverse,
  .tp_clear = clear, .tp_dealloc = dealloc, .tp_methods = methods, .tp_call = PyVectorcall_Call,
  .tp_vectorcall_offset = offsetof(Launch, call),
};

#include "_plans.c"

/* drive(device type, cuLaunchKernelEx, cuCtxGetDevice, cuStreamIsCapturing, runtime knobs, compilation knobs,
   what makes a tensor of sizes, strides and a dtype on the current device, cuTensorMapEncodeTiled = 0, what makes and
   launches graphs = ()) */
static PyObject *drive(PyObject *module, PyObject *given) {
  PyObject *r, *c, *e, *g = NULL;
  unsigned long long launch, device, capturing, encodes = 0, of_graphs[10] = {0};
  int type;
  (void)module;
  if (!PyArg_ParseTuple(given, "iKKKOOO|KO!", &type, &launch, &device, &capturing, &r, &c, &e, &encodes, &PyTuple_Type, &g))
    return NULL;
  if (g != NULL && PyTuple_GET_SIZE(g) != 0
      && !PyArg_ParseTuple(g, "KKKKKKKKKK", &of_graphs[0], &of_graphs[1], &of_graphs[2], &of_graphs[3], &of_graphs[4],
                           &of_graphs[5], &of_graphs[6], &of_graphs[7], &of_graphs[8], &of_graphs[9])) return NULL;
  PyObject *before = PyObject_GetAttr(r, s_enter), *after = before == NULL ? NULL : PyObject_GetAttr(r, s_leave);
  if (after == NULL) { Py_XDECREF(before); return NULL; }
  /* Nothing has failed: all of it from here on, or nothing. */
  device_type = type;
  start = (CUresult (*)(const CUlaunchConfig *, CUfunction, void **, void **))(uintptr_t)launch;
  current_device = (CUresult (*)(CUdevice *))(uintptr_t)device;
  captures = (CUresult (*)(CUstream, int *))(uintptr_t)capturing;
  encode = (CUresult (*)(CUtensorMap *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                         const uint32_t *, int, int, int, int))(uintptr_t)encodes;
  for (Graph *old = kept, *next; old != NULL; old = next) { next = old->next; free(old); }
  kept = NULL;
  keeping = 0;
  graphs.create = (CUresult (*)(CUgraph *, unsigned))(uintptr_t)of_graphs[0];
  graphs.add = (CUresult (*)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const Node *))(uintptr_t)of_graphs[1];
  graphs.connect = (CUresult (*)(CUgraph, const CUgraphNode *, const CUgraphNode *, const Edge *, size_t))(uintptr_t)of_graphs[2];
  graphs.instantiate = (CUresult (*)(CUgraphExec *, CUgraph, unsigned long long))(uintptr_t)of_graphs[3];
  graphs.destroy = (CUresult (*)(CUgraph))(uintptr_t)of_graphs[4];
  graphs.set = (CUresult (*)(CUgraphExec, CUgraphNode, const Node *))(uintptr_t)of_graphs[5];
  graphs.launch = (CUresult (*)(CUgraphExec, CUstream))(uintptr_t)of_graphs[6];
  graphs.exchange = (CUresult (*)(int *))(uintptr_t)of_graphs[7];
  graphs.priority = (CUresult (*)(CUstream, int *))(uintptr_t)of_graphs[8];
  graphs.partition = (CUresult (*)(CUstream, void **))(uintptr_t)of_graphs[9];
  Py_XSETREF(enter, before);
  Py_XSETREF(leave, after);
  Py_XSETREF(runtime, Py_NewRef(r));
  Py_XSETREF(compilation, Py_NewRef(c));
  Py_XSETREF(empty_strided, Py_NewRef(e));
  Py_RETURN_NONE;
}

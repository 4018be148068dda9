/* A call read once, off its arguments: what selection and checks may know of it, and what plans may (see _native.py).

   Plain is a call of which nothing need be asked one by one: every tensor is torch's own, in memory, on one device, and
   nested in its strides; none requires grad, is negated or complex; sizes agree. Of any other nothing is read, and the
   key is made by Python.

   What plans may know besides: of a tensor all sizes but the first, strides, and which earlier argument begins where it
   does; of an int or bool its value; of a float its sign. The rest (pointers, first sizes, floats) goes with the call. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { void *data; struct { int32_t type, id; } device; int32_t ndim;
                 struct { uint8_t code, bits; uint16_t lanes; } dtype;
                 int64_t *shape, *strides; uint64_t byte_offset; } Tensor;
typedef struct { struct { uint32_t major, minor; } version; void *previous; void *allocate, *from_object, *to_object;
                 int (*read)(void *object, Tensor *out);
                 int (*stream)(int32_t type, int32_t id, void **out); } Exchange;
typedef union { uint64_t u; int64_t i; int32_t w; float f; double d; uint8_t b; } Value;

enum { ARGUMENTS = 24, STATIC = 8, PAIRS = 48, SIGNS = 2 + ARGUMENTS * (1 + STATIC), WORDS = 256, COMPLEX = 5,
       LONGEST = INT32_MAX - 1023 };
enum { OPTIONAL = 1, ALIGNED = 2, REAL = 4 };      /* of a tensor: may be None; what of it counts */
enum { TENSOR, SCALE, CHOICE, OFF, ANY };          /* of a value: its class and whether it is 0, it, or `off`; whether it is None */
enum { POINTER = 1 << 28, NONE = 2 << 28, BOOL = 3 << 28, FLOAT = 4 << 28, INT = 5 << 28 };

static const Exchange *exchange;
static int32_t device_type = -1;                   /* whose calls have plans */
static PyObject *tensor_type, *parameter_type, *grad_enabled, *tracing, *forward;
static PyObject *s_level, *s_grad, *s_neg;

typedef struct { uint32_t key; Value value; int64_t length; } Given;
typedef struct {
  PyObject_HEAD
  size_t signs, words;                             /* words: 0 where no plan is found by it */
  uint64_t hash;                                   /* of the words */
  int device;
  int32_t sign[SIGNS];
  int64_t key[WORDS];
  Given args[ARGUMENTS + 1];                       /* the last: what the plan allocates */
} Call;
static PyTypeObject call_type;
static Call *spare;

typedef struct { uint8_t kind, flags; int count; int16_t dims[STATIC]; double off; } Argument;
typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Py_ssize_t count, pairs;
  Argument args[ARGUMENTS];
  struct { int8_t a, i, b, j; } pair[PAIRS];       /* sizes that agree where both tensors are there */
} Signer;

static int is_tensor(PyObject *a) {
  return (PyObject *)Py_TYPE(a) == tensor_type || (PyObject *)Py_TYPE(a) == parameter_type;
}

static Call *call_new(void) {
  Call *made = spare;
  if (made == NULL) return PyObject_New(Call, &call_type);
  spare = NULL;
  return (Call *)PyObject_Init((PyObject *)made, &call_type);
}

static void call_dealloc(PyObject *call) {
  if (spare == NULL) spare = (Call *)call;
  else PyObject_Free(call);
}

static Py_hash_t call_hash(PyObject *object) {
  const Call *call = (Call *)object;
  uint64_t hash = 0;
  for (size_t i = 0; i < call->signs; i++) hash = (hash ^ (uint32_t)call->sign[i]) * 0x9E3779B97F4A7C15u;
  return (Py_hash_t)((hash ^ hash >> 32) >> 1);
}

static PyObject *call_compare(PyObject *a, PyObject *b, int how) {
  if (Py_TYPE(b) != &call_type || (how != Py_EQ && how != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
  const Call *x = (Call *)a, *y = (Call *)b;
  int same = x->signs == y->signs && memcmp(x->sign, y->sign, sizeof(int32_t) * x->signs) == 0;
  return PyBool_FromLong(same == (how == Py_EQ));
}

/* What plans are found by, as bytes. */
static PyObject *call_key(PyObject *object, void *unused) {
  (void)unused;
  return PyBytes_FromStringAndSize((const char *)((Call *)object)->key, (Py_ssize_t)(sizeof(int64_t) * ((Call *)object)->words));
}

static PyGetSetDef call_members[] = {{"key", call_key, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyTypeObject call_type = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "hal.ops._call.Call", .tp_basicsize = sizeof(Call), .tp_dealloc = call_dealloc, .tp_hash = call_hash,
  .tp_richcompare = call_compare, .tp_getset = call_members, .tp_flags = Py_TPFLAGS_DEFAULT,
};

static void pointer_of(const Tensor *t, Given *to) {
  to->value.u = (uint64_t)(uintptr_t)t->data + t->byte_offset;
  to->key = POINTER | (uint32_t)t->dtype.code << 12 | (uint32_t)t->dtype.bits << 4 | ((to->value.u & 15) == 0);
}

/* What plans may know of an argument; `t`: a tensor, as it was read. 0: no plan knows such a one. */
static int plan_argument(Call *to, Py_ssize_t n, PyObject *a, const Tensor *t) {
  Given *arg = &to->args[n];
  size_t w = to->words;
  if (w + 2u * (size_t)(t == NULL ? 1 : t->ndim) + 1u > WORDS) return 0;
  if (t != NULL) {
    if (t->device.type != device_type || t->dtype.lanes != 1 || t->strides == NULL
        || (to->device >= 0 && t->device.id != to->device)) return 0;
    to->device = t->device.id;
    pointer_of(t, arg);
    arg->length = t->ndim ? t->shape[0] : 1;
    if (arg->length > LONGEST) return 0;
    Py_ssize_t same = 0;
    while (!(to->args[same].key >> 28 == POINTER >> 28 && to->args[same].value.u == arg->value.u)) same++;
    to->key[w++] = (int64_t)arg->key | (int64_t)t->ndim << 32 | (int64_t)same << 40;
    for (int i = 1; i < t->ndim; i++) to->key[w++] = t->shape[i];
    for (int i = 0; i < t->ndim; i++) to->key[w++] = t->strides[i];
  } else {
    arg->length = -1;
    if (a == Py_None) {
      arg->value.u = 0;
      to->key[w++] = arg->key = NONE;
    } else if (Py_TYPE(a) == &PyFloat_Type) {
      double v = arg->value.d = PyFloat_AS_DOUBLE(a);
      to->key[w++] = (arg->key = FLOAT) | (v > 0 ? 1 : v < 0 ? 2 : v == 0 ? 3 : 4);
    } else if (Py_TYPE(a) == &PyBool_Type || Py_TYPE(a) == &PyLong_Type) {
      int over;
      int64_t v = PyLong_AsLongLongAndOverflow(a, &over);
      if (over) return 0;
      arg->key = FLOAT;
      arg->value.d = (double)v;
      to->key[w++] = Py_TYPE(a) == &PyBool_Type ? BOOL : INT;
      to->key[w++] = v;
    } else {
      return 0;
    }
  }
  to->words = w;
  return 1;
}

static int plan_end(Call *to) {
  to->key[0] = to->device;
  to->hash = 0;
  for (size_t i = 0; i < to->words; i++) to->hash = (to->hash ^ (uint64_t)to->key[i]) * 0x9E3779B97F4A7C15u;
  to->hash ^= to->hash >> 32;
  return to->device >= 0;
}

/* 2: contiguous; 1: the last dim is; 0: neither; -1: strides that don't nest. */
static int32_t stride_class(const Tensor *t) {
  int contiguous = 1;
  int64_t extent = 0, size = 1;
  for (int i = t->ndim - 1; i >= 0; i--) {
    int64_t n = t->shape[i], step = t->strides[i];
    if (n == 1) continue;
    if (n == 0 || step <= extent) return -1;
    contiguous &= step == size;
    extent += (n - 1) * step;
    size *= n;
  }
  if (contiguous) return 2;
  return t->ndim > 0 && (t->strides[t->ndim - 1] == 1 || t->shape[t->ndim - 1] == 1);
}

static int truth(PyObject *of) {
  int found = of == NULL ? -1 : PyObject_IsTrue(of);
  Py_XDECREF(of);
  return found;
}

/* 1: nothing follows what is done here. */
static int untracked(int *grad) {
  PyObject *trace = PyObject_CallNoArgs(tracing), *level = PyObject_GetAttr(forward, s_level);
  int plain = trace == Py_None && level != NULL && PyLong_Check(level) && PyLong_AsLong(level) < 0;
  Py_XDECREF(trace);
  Py_XDECREF(level);
  *grad = truth(PyObject_CallNoArgs(grad_enabled));
  return plain && *grad >= 0;
}

/* What selection and checks may know of a tensor. 0: the call is not plain. */
static int sign_tensor(const Argument *arg, PyObject *a, const Tensor *t, int grad, Call *to) {
  int32_t *sign = to->sign;
  if (t->data == NULL || t->strides == NULL || t->byte_offset != 0 || t->dtype.lanes != 1 || t->dtype.code == COMPLEX
      || t->ndim > 31) return 0;
  if (sign[0] < 0) {
    sign[0] = t->device.type;
    sign[1] = t->device.id;
  }
  int32_t class = stride_class(t), aligned = !(arg->flags & ALIGNED) || ((uintptr_t)t->data & 15) == 0;
  if (t->device.type != sign[0] || t->device.id != sign[1] || class < 0) return 0;
  if (arg->flags & REAL && (truth(PyObject_CallMethodNoArgs(a, s_neg)) != 0
                            || (grad && truth(PyObject_GetAttr(a, s_grad)) != 0))) return 0;
  sign[to->signs++] = t->dtype.code | t->dtype.bits << 8 | t->ndim << 16 | class << 24 | aligned << 28;
  for (int i = 0; i < arg->count; i++) {
    int dim = arg->dims[i] < 0 ? arg->dims[i] + t->ndim : arg->dims[i];
    int64_t size = dim >= 0 && dim < t->ndim ? t->shape[dim] : -1;
    if (size > INT32_MAX) return 0;
    sign[to->signs++] = (int32_t)size;
  }
  if (arg->kind == SCALE)
    for (int i = 0; i < t->ndim; i++)
      if (t->shape[i] != 1) return 0;
  return 1;
}

/* The same of what is no tensor. */
static int sign_value(const Argument *arg, PyObject *a, Call *to) {
  int32_t *sign = &to->sign[to->signs];
  Value v = {.u = 0};
  int is;
  to->signs += arg->kind == CHOICE ? 3 : 1;
  if (arg->kind == ANY || (a == Py_None && (arg->kind != TENSOR || arg->flags & OPTIONAL))) {
    sign[0] = a == Py_None ? -1 : 0;
    sign[arg->kind == CHOICE] = sign[2 * (arg->kind == CHOICE)] = sign[0];
    return 1;
  }
  if (arg->kind == TENSOR) return 0;
  if (Py_TYPE(a) == &PyFloat_Type) {
    v.d = PyFloat_AS_DOUBLE(a);
    is = v.d == arg->off;
  } else if (Py_TYPE(a) == &PyBool_Type || Py_TYPE(a) == &PyLong_Type) {
    int over;
    v.i = PyLong_AsLongLongAndOverflow(a, &over);
    if (over) return 0;
    is = (double)v.i == arg->off;
  } else {
    return 0;
  }
  sign[0] = Py_TYPE(a) == &PyFloat_Type ? 1 : Py_TYPE(a) == &PyLong_Type ? 2 : 3;
  if (arg->kind == CHOICE) memcpy(sign + 1, &v, sizeof v);
  else sign[0] |= is << 8;
  return 1;
}

static PyObject *sign(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names) {
  Signer *self = (Signer *)object;
  Tensor tensors[ARGUMENTS];
  int grad;
  if (names != NULL || PyVectorcall_NARGS(nargsf) != self->count || !untracked(&grad)) { PyErr_Clear(); Py_RETURN_NONE; }
  Call *to = call_new();
  if (to == NULL) return NULL;
  int planned = 1;
  to->signs = 2;
  to->words = 1;
  to->device = to->sign[0] = -1;
  for (Py_ssize_t n = 0; n < self->count; n++) {
    const Argument *arg = &self->args[n];
    Tensor *t = arg->kind <= SCALE && is_tensor(args[n]) ? &tensors[n] : NULL;
    tensors[n].shape = NULL;
    if (t != NULL ? exchange->read(args[n], t) != 0 || !sign_tensor(arg, args[n], t, grad, to) : !sign_value(arg, args[n], to))
      goto none;
    planned = planned && (t == NULL || t->device.type == device_type) && plan_argument(to, n, args[n], t);
  }
  for (Py_ssize_t p = 0; p < self->pairs; p++) {
    const Tensor *a = &tensors[self->pair[p].a], *b = &tensors[self->pair[p].b];
    if (a->shape != NULL && b->shape != NULL
        && (self->pair[p].i >= a->ndim || self->pair[p].j >= b->ndim || a->shape[self->pair[p].i] != b->shape[self->pair[p].j]))
      goto none;
  }
  if (to->sign[0] < 0) goto none;
  if (!planned || !plan_end(to)) to->words = 0;
  return (PyObject *)to;
none:
  Py_DECREF(to);
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* Signer(((kind, flags, (dim, ...), off), ...), ((a, i, b, j), ...)) */
static int signer_init(PyObject *object, PyObject *given, PyObject *names) {
  Signer *self = (Signer *)object;
  PyObject *args, *pairs;
  (void)names;
  if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &args, &PyTuple_Type, &pairs)) return -1;
  if (PyTuple_GET_SIZE(args) > ARGUMENTS || PyTuple_GET_SIZE(pairs) > PAIRS) goto much;
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(args); n++) {
    PyObject *dims;
    Argument *arg = &self->args[n];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(args, n), "bbO!d", &arg->kind, &arg->flags, &PyTuple_Type, &dims, &arg->off))
      return -1;
    if (PyTuple_GET_SIZE(dims) > STATIC) goto much;
    arg->count = (int)PyTuple_GET_SIZE(dims);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims); i++) arg->dims[i] = (int16_t)PyLong_AsLong(PyTuple_GET_ITEM(dims, i));
  }
  for (Py_ssize_t p = 0; p < PyTuple_GET_SIZE(pairs); p++) {
    int a, i, b, j;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, p), "iiii", &a, &i, &b, &j)) return -1;
    if (a < 0 || b < 0 || i < 0 || j < 0 || a >= PyTuple_GET_SIZE(args) || b >= PyTuple_GET_SIZE(args) || i > 31 || j > 31)
      goto much;
    self->pair[p].a = (int8_t)a, self->pair[p].i = (int8_t)i, self->pair[p].b = (int8_t)b, self->pair[p].j = (int8_t)j;
  }
  self->count = PyTuple_GET_SIZE(args);
  self->pairs = PyTuple_GET_SIZE(pairs);
  self->call = sign;
  return PyErr_Occurred() ? -1 : 0;
much:
  PyErr_SetString(PyExc_ValueError, "hal: more than a signer has room for");
  return -1;
}

static PyTypeObject signer_type = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "hal.ops._call.Signer", .tp_basicsize = sizeof(Signer), .tp_new = PyType_GenericNew, .tp_init = signer_init,
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_call = PyVectorcall_Call,
  .tp_vectorcall_offset = offsetof(Signer, call),
};

#include "../triton/_launch.c"

/* setup(exchange, Tensor, Parameter, is_grad_enabled, what gives the state of tracing, forward_ad) */
static PyObject *setup(PyObject *module, PyObject *given) {
  PyObject *capsule, *t, *p, *g, *j, *f;
  (void)module;
  if (!PyArg_ParseTuple(given, "OOOOOO", &capsule, &t, &p, &g, &j, &f)) return NULL;
  const Exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api == NULL) return NULL;
  if (api->version.major != 1 || api->read == NULL || api->stream == NULL)
    return PyErr_Format(PyExc_RuntimeError, "DLPack exchange interface %u.%u", api->version.major, api->version.minor);
  exchange = api;
  Py_XSETREF(tensor_type, Py_NewRef(t));
  Py_XSETREF(parameter_type, Py_NewRef(p));
  Py_XSETREF(grad_enabled, Py_NewRef(g));
  Py_XSETREF(tracing, Py_NewRef(j));
  Py_XSETREF(forward, Py_NewRef(f));
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
  {"setup", setup, METH_VARARGS, NULL}, {"drive", drive, METH_VARARGS, NULL},
  {"graphs", graphs_kept, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "hal_call", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_hal_call(void) {
  struct { PyObject **to; const char *text; } names[] = {
    {&s_level, "_current_level"}, {&s_grad, "requires_grad"}, {&s_neg, "is_neg"}, {&s_dtype, "dtype"},
    {&s_enter, "launch_enter_hook"}, {&s_leave, "launch_exit_hook"}, {&s_calls, "calls"}, {&s_debug, "debug"},
    {&s_instrumentation, "instrumentation_mode"}};
  PyTypeObject *types[] = {&call_type, &signer_type, &launch_type, &plans_type};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if ((*names[i].to = PyUnicode_InternFromString(names[i].text)) == NULL) return NULL;
  PyObject *m = PyModule_Create(&module);
  for (size_t i = 0; m != NULL && i < sizeof types / sizeof *types; i++)
    if (PyModule_AddType(m, types[i]) < 0) Py_CLEAR(m);
  return m;
}

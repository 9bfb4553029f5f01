// Runs an ONNX file with npm's onnxruntime-node or onnxruntime-web (WebAssembly, here in Node): images.npy's values in,
// the first output's values out, as JSON. usage: node run_onnx.mjs FOLDER PACKAGE FILE INPUTS.json
import fs from "node:fs";
import { createRequire } from "node:module";

const [folder, name, file, inputs] = process.argv.slice(2);
const ort = createRequire(`${folder}/package.json`)(name);
if (name === "onnxruntime-web") ort.env.wasm.numThreads = 1;
const providers = [name === "onnxruntime-web" ? "wasm" : "cpu"];
const session = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(file)), { executionProviders: providers });
const { type, dims, values } = JSON.parse(fs.readFileSync(inputs, "utf8"));
const data = type === "uint8" ? Uint8Array.from(values) : Float32Array.from(values);
const answers = await session.run({ [session.inputNames[0]]: new ort.Tensor(type, data, dims) });
const first = answers[session.outputNames[0]];
console.log(JSON.stringify({ dims: first.dims, values: Array.from(first.data) }));

// The planner: WebAssembly in a thread of its own. A trap ends the instance; the next question gets a new one.
function planner() {
  let compiled;
  const begin = async gzipped => {
    const unzipped = new Blob([gzipped]).stream().pipeThrough(new DecompressionStream("gzip"));
    return WebAssembly.compile(await new Response(unzipped).arrayBuffer());
  };
  const instance = async module => {
    // Nothing that is imported is ever called: the planner asks for no clock, no entropy and no file.
    const imports = {};
    for (const { module: from, name } of WebAssembly.Module.imports(module)) {
      (imports[from] ??= {})[name] = () => { throw new Error(`${from}.${name} is not there`); };
    }
    return (await WebAssembly.instantiate(module, imports)).exports;
  };
  const ask = (wasm, question) => {
    const text = new TextEncoder().encode(JSON.stringify(question));
    const at = wasm.question(text.length) >>> 0;
    if (at === 0) throw new Error("the question is too long");
    new Uint8Array(wasm.memory.buffer, at, text.length).set(text);
    const bytes = wasm.answer() >>> 0;
    return JSON.parse(new TextDecoder().decode(new Uint8Array(wasm.memory.buffer, wasm.answer_at() >>> 0, bytes)));
  };
  return async (gzipped, question) => {
    compiled ??= begin(gzipped);
    try {
      return ask(await instance(await compiled), question);
    } catch (error) {
      return { exit: 1, error: `error: this plan cannot be computed in a browser: ${error.message}\nhint: train_low_mem plan computes it\n`, json: "", text: "" };
    }
  };
}

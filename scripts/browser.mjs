// Controls a headless Chromium through two pipes, for the scripts that open pages. Needs node 18 or later and no package.
import fs from "node:fs";
import { spawn } from "node:child_process";

// Opens a page in a window of this width, and waits until the expression `ready` is true in the page. `said` has every exception, console
// message and log error; `asked` has the address of every request except the page's own.
export async function open(browser, address, { width, dark = false, print = false, ready = `document.readyState === "complete"` }) {
  const child = spawn(browser, ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank"], { detached: true, stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
  // Debian's command is a script that stays the browser's parent, so the whole process group must be killed.
  const kill = () => { try { process.kill(-child.pid, "SIGKILL"); } catch { /* It has ended. */ } };
  process.on("exit", kill);
  const ended = new Promise(done => child.on("close", done));
  const failed = new Promise((_, fail) => {
    child.on("error", error => fail(new Error(`${browser}: ${error.message}`)));
    child.on("exit", () => fail(new Error(`${browser} ended`)));
  });
  failed.catch(() => {});
  child.stdio[3].on("error", () => {});
  const waiting = new Map(), said = [], asked = [];
  let rest = "", last = 0, session;
  child.stdio[4].setEncoding("utf8").on("data", text => {
    const messages = (rest + text).split("\0");
    rest = messages.pop();
    for (const message of messages.map(message => JSON.parse(message))) {
      waiting.get(message.id)?.(message);
      if (["Runtime.exceptionThrown", "Log.entryAdded"].includes(message.method)) said.push(JSON.stringify(message.params));
      if (message.method === "Runtime.consoleAPICalled") said.push(JSON.stringify(message.params.args));
      if (message.method === "Network.requestWillBeSent" && message.params.request.url !== address.split("#")[0]) asked.push(message.params.request.url);
    }
  });
  const tell = (method, params = {}) => {
    const answered = new Promise((done, fail) => {
      const id = ++last;
      waiting.set(id, message => {
        waiting.delete(id);
        if (message.error) fail(new Error(`${method}: ${message.error.message}`)); else done(message.result ?? {});
      });
      child.stdio[3].write(JSON.stringify({ id, method, params, sessionId: session }) + "\0");
    });
    return Promise.race([answered, failed]);
  };
  const value = async expression => {
    const { result, exceptionDetails } = await tell("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  };
  const { targetId } = await tell("Target.createTarget", { url: "about:blank" });
  ({ sessionId: session } = await tell("Target.attachToTarget", { targetId, flatten: true }));
  for (const domain of ["Runtime", "Log", "Page", "Network"]) await tell(`${domain}.enable`);
  await tell("Emulation.setDeviceMetricsOverride", { width, height: 900, deviceScaleFactor: 1, mobile: false });
  const media = print ? "print" : "";
  await tell("Emulation.setEmulatedMedia", { media, features: [{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }] });
  await tell("Page.navigate", { url: address });
  for (let tries = 0; tries < 300 && !(await value(ready)); tries++) await new Promise(done => setTimeout(done, 100));
  return {
    said, asked, value, tell,
    // Moves the mouse to a position in the window.
    hover: (x, y) => tell("Input.dispatchMouseEvent", { type: "mouseMoved", x, y }),
    // Writes the whole page as a PNG file.
    async picture(file) {
      const height = await value("document.documentElement.scrollHeight");
      const { data } = await tell("Page.captureScreenshot", { captureBeyondViewport: true, clip: { x: 0, y: 0, width, height, scale: 1 } });
      fs.writeFileSync(file, Buffer.from(data, "base64"));
    },
    async close() {
      session = undefined;
      await tell("Browser.close").catch(() => {});
      await Promise.race([ended, new Promise(done => setTimeout(done, 5000).unref())]);
      kill();
      process.off("exit", kill);
    },
  };
}

// The value after an option of the command line, or null.
export const option = name => process.argv.includes(name) ? process.argv[process.argv.indexOf(name) + 1] : null;

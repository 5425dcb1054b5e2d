// Requests to the server. Every failure is an Error with a readable message.

export const client = crypto.getRandomValues(new Uint32Array(2)).join("-");

async function check(response) {
  if (response.ok) return response;
  let text = await response.text(), version;
  try {
    const content = JSON.parse(text);
    version = content.version;
    text = typeof content.error === "string" ? content.error : "the server did not understand the request";
  } catch { /* plain text */ }
  const error = new Error(text || `the server answered ${response.status}`);
  error.status = response.status;
  error.version = version;
  throw error;
}

async function request(path, options) {
  try {
    return await check(await fetch(`/api/${path}`, options));
  } catch (error) {
    if (error instanceof TypeError) throw new Error("the workbench does not respond; is it still running?");
    throw error;
  }
}

export const get = async (path) => (await request(path)).json();

export const bytes = async (path) => (await request(path)).arrayBuffer();

export const post = async (path, body = {}) =>
  (await request(path, {
    method: "POST",
    headers: { "content-type": "application/json", "x-pclmix": "1" },
    body: JSON.stringify(body),
  })).json();

export const caseUrl = (name, rest) => `cases/${encodeURIComponent(name)}/${rest}`;

export async function readStrokes(name) {
  const response = await request(caseUrl(name, "strokes"));
  const shape = response.headers.get("x-shape").split(",").map(Number);
  return { version: response.headers.get("x-version"), shape, labels: new Uint8Array(await response.arrayBuffer()) };
}

export function upload(name, content, progress) {
  return new Promise((resolve, reject) => {
    const call = new XMLHttpRequest(); // fetch has no upload progress
    call.open("POST", `/api/import?name=${encodeURIComponent(name)}`);
    call.setRequestHeader("x-pclmix", "1");
    call.upload.onprogress = (event) => progress(event.loaded / Math.max(1, event.total));
    call.onerror = () => reject(new Error("the upload was interrupted"));
    call.onload = () => {
      let content = {};
      try { content = JSON.parse(call.responseText); } catch { content = { error: call.responseText }; }
      if (call.status === 200) resolve(content);
      else reject(new Error(content.error || `the server answered ${call.status}`));
    };
    call.send(content);
  });
}

export function listen(handlers) {
  const source = new EventSource("/api/events");
  for (const [kind, handler] of Object.entries(handlers))
    source.addEventListener(kind, (event) => handler(JSON.parse(event.data)));
  return source;
}

// One streamed turn with the OpenAI SDK in which something fails.
// usage: node failing.mjs PACKAGE BASE_URL [helper]; with `helper`, by responses.stream(). Prints what came back, as JSON.
const [name, baseURL, helper] = process.argv.slice(2);
const { default: OpenAI } = await import(name);

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const tools = [{ type: "code_interpreter", container: { type: "auto" } }];
const isCall = (item) => item.type === "code_interpreter_call";
const told = { text: "", types: [] };
try {
  const request = { model: "scripted", input: "Square", tools, stream: true };
  const stream = helper ? client.responses.stream(request) : await client.responses.create(request);
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") told.text += event.delta;
    told.types.push(event.type);
    if (event.type === "response.output_item.done" && isCall(event.item)) told.done = event.item.status;
  }
  if (helper) told.final = (await stream.finalResponse()).output.find(isCall).status;
} catch (error) {
  told.error = error.message;
}
console.log(JSON.stringify(told));

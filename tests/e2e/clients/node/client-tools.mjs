// One turn by responses.stream() of the OpenAI SDK in which the model calls tools that the client runs.
// usage: node client-tools.mjs PACKAGE BASE_URL. Prints what came back, as JSON.
const [name, baseURL] = process.argv.slice(2);
const { default: OpenAI } = await import(name);

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const tools = [{ type: "shell", environment: { type: "local" } }, { type: "apply_patch" }];
const told = { types: [] };
try {
  const stream = client.responses.stream({ model: "scripted", input: "Do it", tools });
  for await (const event of stream) told.types.push(event.type);
  told.output = (await stream.finalResponse()).output.map(({ action, operation }) => action?.commands ?? operation);
} catch (error) {
  told.error = error.message;
}
console.log(JSON.stringify(told));

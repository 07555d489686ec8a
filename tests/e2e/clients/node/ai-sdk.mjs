// Turns with the AI SDK. stored: blocking, streamed after `previousResponseId`, and with the history given back;
// unstored: two turns of which nothing is kept but the container; failing: one streamed turn in which something fails;
// reasoning: a streamed and a blocking turn of a model that thinks, of which nothing is kept.
// usage: node ai-sdk.mjs BASE_URL stored|unstored|failing|reasoning; prints what came back, as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [baseURL, mode] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const interpreter = (settings) => ({ code_interpreter: openai.tools.codeInterpreter(settings) });
const common = { model: openai.responses("scripted"), tools: interpreter({}), maxRetries: 0 };
const square = { role: "user", content: "Square" };
const add = { role: "user", content: "Add" };

async function stored() {
  const first = await generateText({ ...common, messages: [square] });
  const [cited] = first.sources.map((source) => source.providerMetadata.openai);
  const file = await fetch(`${baseURL}/containers/${cited.containerId}/files/${cited.fileId}/content`);

  const parts = [];
  let text = "";
  const previousResponseId = first.providerMetadata.openai.responseId;
  const second = streamText({ ...common, prompt: "Add", providerOptions: { openai: { previousResponseId } } });
  for await (const part of second.stream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
    parts.push(part.type);
  }

  const third = await generateText({ ...common, messages: [square, ...first.response.messages, add] });
  const results = [first, third].flatMap((turn) => turn.toolResults);
  return { texts: [first.text, text, third.text], parts, results, file: await file.text() };
}

async function unstored() {
  const providerOptions = { openai: { store: false } };
  const first = await generateText({ ...common, messages: [square], providerOptions });
  const container = first.toolCalls[0].input.containerId;
  const messages = [square, ...first.response.messages, add];
  const second = await generateText({ ...common, tools: interpreter({ container }), messages, providerOptions });
  return { texts: [first.text, second.text] };
}

async function failing() {
  const told = { text: "", types: [] };
  const turn = streamText({ ...common, prompt: "Square", onError: () => {} });
  for await (const part of turn.stream) {
    if (part.type === "error") told.error = part.error.message;
    if (part.type === "text-delta") told.text += part.text;
    told.types.push(part.type);
  }
  return told;
}

async function reasoning() {
  const model = openai.responses("scripted-reasoning");
  const providerOptions = { openai: { store: false, reasoningSummary: "auto", forceReasoning: true } };
  const first = streamText({ model, messages: [square], providerOptions, maxRetries: 0 });
  let thought = "";
  for await (const part of first.stream) {
    if (part.type === "error") throw part.error;
    if (part.type === "reasoning-delta") thought += part.text;
  }
  const messages = [square, ...(await first.response).messages, add];
  const second = await generateText({ model, messages, providerOptions, maxRetries: 0 });
  return { thoughts: [thought, second.reasoningText], texts: [await first.text, second.text] };
}

console.log(JSON.stringify(await { stored, unstored, failing, reasoning }[mode]()));

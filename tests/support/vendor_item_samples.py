"""Items of every vendor, one for each shape that `fumehood.message_parts` knows and some that it does not."""

# fmt: off

from typing import Any

type Sample = dict[str, Any]

_PNG = "iVBORw0KGgo="

OPENAI: list[Sample] = [
    {"type": "message", "id": "msg_0", "status": "completed", "role": "user", "content": [
        {"type": "input_text", "text": "Draw π."},
        {"type": "input_image", "image_url": f"data:image/png;base64,{_PNG}", "detail": "auto"},
        {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "low"},
        {"type": "input_file", "file_id": "file_9"},
    ]},
    {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "I draw."}],
     "content": [{"type": "reasoning_text", "text": "A circle."}], "encrypted_content": "gAAA", "status": None},
    {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "container_id": "cntr_1",
     "code": "print(2)", "outputs": [{"type": "logs", "logs": "2\n"}, {"type": "image", "url": "https://e.x/y.png"}]},
    {"type": "code_interpreter_call", "id": "ci_2", "status": "failed", "container_id": "cntr_1", "code": None,
     "outputs": None},
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["q"], "results": [
        {"file_id": "file_1", "filename": "a.md", "score": 0.9, "text": "t", "attributes": {}}]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {
        "type": "search", "query": "q", "queries": ["q"], "sources": [{"type": "url", "url": "https://e.x"}]}},
    {"type": "web_search_call", "id": "ws_2", "status": "completed",
     "action": {"type": "open_page", "url": "https://e.x"}},
    {"type": "web_search_call", "id": "ws_3", "status": "completed",
     "action": {"type": "find_in_page", "url": "https://e.x", "pattern": "p"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": _PNG},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": [{"name": "t", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "s", "name": "t", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True, "id": "mcprr_1"},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "t", "arguments": "{}", "output": "ok",
     "error": None, "status": "completed", "approval_request_id": "mcpr_1"},
    {"type": "function_call", "id": "fc_1", "call_id": "call_0", "name": "f", "arguments": '{"a": 1}',
     "status": "completed"},
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_0", "output": "3", "status": "completed"},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_9", "name": "g", "input": "some text"},
    {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_9", "output": "done",
     "status": "completed"},
    {"type": "computer_call", "id": "cu_1", "call_id": "call_1", "status": "completed", "pending_safety_checks": [],
     "action": {"type": "click", "button": "left", "x": 1, "y": 2}},
    {"type": "computer_call_output", "id": "cuo_1", "call_id": "call_1", "status": "completed",
     "output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{_PNG}"}},
    {"type": "shell_call", "id": "sh_1", "call_id": "call_2", "status": "completed",
     "action": {"commands": ["ls"], "timeout_ms": 1000, "max_output_length": 4096},
     "environment": {"type": "container_reference", "container_id": "cntr_1"}},
    {"type": "shell_call_output", "id": "sho_1", "call_id": "call_2", "status": "completed",
     "max_output_length": 4096, "output": [
         {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_8", "status": "completed",
     "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "working_directory": "/tmp"}},
    {"type": "local_shell_call_output", "id": "call_8", "output": '{"output": "a"}', "status": "completed"},
    {"type": "apply_patch_call", "id": "apc_1", "call_id": "call_3", "status": "completed",
     "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}},
    {"type": "apply_patch_call_output", "id": "apo_1", "call_id": "call_3", "status": "completed", "output": "Done"},
    {"type": "tool_search_call", "id": "ts_1", "call_id": None, "execution": "server", "status": "completed",
     "arguments": {"query": "crm"}},
    {"type": "tool_search_output", "id": "tso_1", "call_id": None, "execution": "server", "status": "completed",
     "tools": []},
    {"type": "program", "id": "pr_1", "call_id": "call_4", "code": "1+1", "fingerprint": "f"},
    {"type": "program_output", "id": "po_1", "call_id": "call_4", "result": "2", "status": "completed"},
    {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "Here.", "annotations": [
            {"type": "container_file_citation", "container_id": "cntr_1", "file_id": "cfile_1", "filename": "a.png",
             "start_index": 0, "end_index": 4}], "logprobs": []},
        {"type": "refusal", "refusal": "No more."},
    ]},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"},
]

ANTHROPIC: list[Sample] = [
    {"type": "thinking", "thinking": "I search.", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "AAA"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"},
     "caller": {"type": "direct"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [
        {"type": "web_search_result", "url": "https://e.x", "title": "T", "encrypted_content": "AAA",
         "page_age": None}]},
    {"type": "server_tool_use", "id": "srvtoolu_8", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_8",
     "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}},
    {"type": "server_tool_use", "id": "srvtoolu_2", "name": "web_fetch", "input": {"url": "https://e.x"}},
    {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_2", "content": {
        "type": "web_fetch_result", "url": "https://e.x", "retrieved_at": None, "content": {
            "type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
            "title": None, "citations": None}}},
    {"type": "server_tool_use", "id": "srvtoolu_3", "name": "code_execution", "input": {"code": "print(2)"}},
    {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_3", "content": {
        "type": "code_execution_result", "stdout": "2\n", "stderr": "", "return_code": 0,
        "content": [{"type": "code_execution_output", "file_id": "file_1"}]}},
    {"type": "server_tool_use", "id": "srvtoolu_9", "name": "code_execution", "input": {"code": "search()"}},
    {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_9", "content": {
        "type": "encrypted_code_execution_result", "encrypted_stdout": "AAA", "stderr": "", "return_code": 0,
        "content": []}},
    {"type": "server_tool_use", "id": "srvtoolu_10", "name": "code_execution", "input": {}},
    {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_10",
     "content": {"type": "code_execution_tool_result_error", "error_code": "unavailable"}},
    {"type": "server_tool_use", "id": "srvtoolu_4", "name": "bash_code_execution", "input": {"command": "ls"}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_4", "content": {
        "type": "bash_code_execution_result", "stdout": "a\n", "stderr": "", "return_code": 0, "content": []}},
    {"type": "server_tool_use", "id": "srvtoolu_6", "name": "text_editor_code_execution",
     "input": {"command": "view", "path": "a.py"}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "srvtoolu_6", "content": {
        "type": "text_editor_code_execution_view_result", "content": "x", "file_type": "text", "num_lines": 1,
        "start_line": 1, "total_lines": 1}},
    {"type": "server_tool_use", "id": "srvtoolu_7", "name": "tool_search_tool_regex", "input": {"pattern": "crm"}},
    {"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_7", "content": {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "t"}]}},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "t", "server_name": "s", "input": {"a": 1}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False,
     "content": [{"type": "text", "text": "ok"}]},
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
    {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": [
        {"name": "t", "description": "Does it.", "input_schema": {"type": "object"}}]},
    {"type": "container_upload", "file_id": "file_1"},
    {"type": "text", "text": "Here.", "citations": None},
]

# What a client sends, and what the SDK's types of answers do not have.
ANTHROPIC_SENT: list[Sample] = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}},
    {"type": "image", "source": {"type": "url", "url": "https://e.x/a.png"}},
    {"type": "document", "source": {"type": "file", "file_id": "file_2"}, "title": "T"},
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3", "is_error": True},
    {"type": "server_tool_use", "id": "srvtoolu_20", "name": "divination", "input": {"of": "stars"}},
    {"type": "divination_tool_result", "tool_use_id": "srvtoolu_20", "content": {"said": "yes"}},
]

GEMINI: Sample = {
    "candidates": [{
        "content": {"role": "model", "parts": [
            {"text": "I compute.", "thought": True},
            {"executableCode": {"language": "PYTHON", "code": "print(2)", "id": "x1"}},
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2\n", "id": "x1"}},
            {"executableCode": {"language": "PYTHON", "code": "1/0"}},
            {"codeExecutionResult": {"outcome": "OUTCOME_FAILED", "output": "ZeroDivisionError"}},
            {"toolCall": {"toolType": "GOOGLE_SEARCH_WEB", "id": "g1", "args": {"queries": ["q"]}}},
            {"toolResponse": {"toolType": "GOOGLE_SEARCH_WEB", "id": "g1",
                              "response": {"search_suggestions": "<div/>"}}},
            {"toolCall": {"toolType": "URL_CONTEXT", "id": "g2", "args": {"urls": ["https://e.x"]}}},
            {"toolResponse": {"toolType": "URL_CONTEXT", "id": "g2", "response": {}}},
            {"functionCall": {"id": "f1", "name": "f", "args": {"a": 1}}, "thoughtSignature": "c2ln"},
            {"functionResponse": {"id": "f1", "name": "f", "response": {"result": 3}}},
            {"inlineData": {"mimeType": "image/png", "data": _PNG}},
            {"fileData": {"mimeType": "image/png", "fileUri": "gs://b/a.png"}},
            {"text": "2"},
        ]},
        "finishReason": "STOP",
    }],
    "usageMetadata": {"totalTokenCount": 3},
}

GEMINI_GROUNDED: Sample = {
    "candidates": [{
        "content": {"role": "model", "parts": [{"text": "2"}]},
        "finishReason": "STOP",
        "groundingMetadata": {
            "webSearchQueries": ["q"],
            "groundingChunks": [{"web": {"uri": "https://e.x", "title": "e.x"}}],
            "groundingSupports": [{"segment": {"startIndex": 0, "endIndex": 1, "text": "2"},
                                   "groundingChunkIndices": [0]}],
        },
        "urlContextMetadata": {"urlMetadata": [
            {"retrievedUrl": "https://e.x", "urlRetrievalStatus": "URL_RETRIEVAL_STATUS_SUCCESS"}]},
    }],
}

INTERACTIONS: list[Sample] = [
    {"type": "user_input", "content": [{"type": "text", "text": "Compute."}]},
    {"type": "thought", "signature": "c2ln", "summary": [{"type": "text", "text": "I compute."}]},
    {"type": "code_execution_call", "id": "c1", "arguments": {"code": "print(2)", "language": "python"}},
    {"type": "code_execution_result", "call_id": "c1", "result": "2\n", "is_error": False, "signature": "c2ln"},
    {"type": "google_search_call", "id": "c2", "arguments": {"queries": ["q"]}, "search_type": "web_search"},
    {"type": "google_search_result", "call_id": "c2", "result": [{"search_suggestions": "<div/>"}]},
    {"type": "file_search_call", "id": "c3"},
    {"type": "file_search_result", "call_id": "c3"},
    {"type": "url_context_call", "id": "c4", "arguments": {"urls": ["https://e.x"]}},
    {"type": "url_context_result", "call_id": "c4", "result": [{"status": "success", "url": "https://e.x"}]},
    {"type": "google_maps_call", "id": "c5", "arguments": {"queries": ["q"]}},
    {"type": "google_maps_result", "call_id": "c5", "result": []},
    {"type": "retrieval_call", "id": "c6", "arguments": {"queries": ["q"]}, "retrieval_type": "rag_store"},
    {"type": "retrieval_result", "call_id": "c6", "is_error": True},
    {"type": "processing_call", "id": "c9"},
    {"type": "processing_result", "call_id": "c9"},
    {"type": "mcp_server_tool_call", "id": "c7", "name": "t", "server_name": "s", "arguments": {}},
    {"type": "mcp_server_tool_result", "call_id": "c7", "result": "ok", "name": "t", "server_name": "s"},
    {"type": "function_call", "id": "c8", "name": "f", "arguments": {"a": 1}},
    {"type": "function_result", "call_id": "c8", "result": "3", "name": "f"},
    {"type": "model_output", "content": [
        {"type": "text", "text": "2"}, {"type": "image", "mime_type": "image/png", "data": _PNG},
        {"type": "image", "mime_type": "image/png", "uri": "https://e.x/a.png"}]},
]

AZURE: list[Sample] = [
    {"id": "call_1", "type": "code_interpreter", "code_interpreter": {
        "input": "print(2)", "outputs": [{"type": "logs", "logs": "2\n"},
                                         {"type": "image", "image": {"file_id": "file_1"}}]}},
    {"id": "call_2", "type": "file_search", "file_search": {
        "ranking_options": None, "results": [{"file_id": "file_1", "file_name": "a.md", "score": 0.9}]}},
    {"id": "call_3", "type": "bing_grounding",
     "bing_grounding": {"requesturl": "https://api.bing.example/?q=q", "response_metadata": "{}"}},
    {"id": "call_4", "type": "bing_custom_search", "bing_custom_search": {"requesturl": "https://e.x/?q=q"}},
    {"id": "call_5", "type": "azure_ai_search", "azure_ai_search": {"input": "q", "output": "found"}},
    {"id": "call_6", "type": "openapi", "openapi": {"name": "weather", "arguments": "{}", "output": "rain"}},
    {"id": "call_7", "type": "function", "function": {"name": "f", "arguments": "{}", "output": None}},
    {"id": "call_8", "type": "mcp", "name": "t", "arguments": "{}", "output": "ok", "server_label": "s"},
    {"id": "call_9", "type": "deep_research", "deep_research": {"input": "q", "output": "r"}},
    {"id": "as_1", "type": "azure_ai_search_call", "call_id": "call_10", "arguments": '{"query": "q"}',
     "status": "completed"},
    {"id": "aso_1", "type": "azure_ai_search_call_output", "call_id": "call_10", "output": "found",
     "status": "completed"},
]

BEDROCK: list[Sample] = [
    {"reasoningContent": {"reasoningText": {"text": "I compute.", "signature": "c2ln"}}},
    {"toolUse": {"toolUseId": "t1", "name": "nova_code_interpreter", "input": {"snippet": "print(2)"},
                 "type": "server_tool_use"}},
    {"toolResult": {"toolUseId": "t1", "type": "nova_code_interpreter_result", "status": "success",
                    "content": [{"json": {"stdOut": "2\n", "stdErr": "", "exitCode": 0, "isError": False}}]}},
    {"toolUse": {"toolUseId": "t2", "name": "nova_grounding", "input": {"query": "q"}, "type": "server_tool_use"}},
    {"toolResult": {"toolUseId": "t2", "type": "nova_grounding_result", "status": "success",
                    "content": [{"text": "found"}]}},
    {"toolUse": {"toolUseId": "t3", "name": "f", "input": {"a": 1}}},
    {"toolResult": {"toolUseId": "t3", "content": [{"json": {"result": 3}}], "status": "error"}},
    {"toolUse": {"toolUseId": "t4", "name": "divination", "input": {}, "type": "server_tool_use"}},
    {"toolResult": {"toolUseId": "t4", "content": [], "type": "divination_result"}},
    {"image": {"format": "png", "source": {"bytes": _PNG}}},
    {"image": {"format": "png", "source": {"s3Location": {"uri": "s3://b/a.png"}}}},
    {"citationsContent": {"content": [{"text": "Cited."}], "citations": [{"title": "T"}]}},
    {"cachePoint": {"type": "default"}},
    {"text": "2"},
]


def _traced(**inner: Any) -> Sample:
    return {"trace": {"agentId": "A", "sessionId": "s1", "trace": {"orchestrationTrace": inner}}}


BEDROCK_AGENTS: list[Sample] = [
    _traced(rationale={"text": "I compute.", "traceId": "x-0"}),
    _traced(invocationInput={"invocationType": "ACTION_GROUP_CODE_INTERPRETER", "traceId": "x-0",
                             "codeInterpreterInvocationInput": {"code": "print(2)", "files": []}}),
    _traced(observation={"type": "ACTION_GROUP", "traceId": "x-0", "codeInterpreterInvocationOutput": {
        "executionOutput": "2\n", "executionTimeout": False, "metadata": {"totalTimeMs": 12}}}),
    _traced(invocationInput={"traceId": "x-1", "invocationType": "KNOWLEDGE_BASE",
                             "knowledgeBaseLookupInput": {"knowledgeBaseId": "K", "text": "q"}}),
    _traced(observation={"traceId": "x-1", "type": "KNOWLEDGE_BASE", "knowledgeBaseLookupOutput": {
        "retrievedReferences": [{"content": {"text": "t"}, "location": {"type": "S3"}}]}}),
    _traced(invocationInput={"traceId": "x-2", "invocationType": "ACTION_GROUP", "actionGroupInvocationInput": {
        "actionGroupName": "g", "function": "f", "executionType": "LAMBDA",
        "parameters": [{"name": "a", "type": "number", "value": "1"}]}}),
    _traced(observation={"traceId": "x-2", "actionGroupInvocationOutput": {"text": "3"}}),
    {"trace": {"orchestrationTrace": {"invocationInput": {"traceId": "x-3", "actionGroupInvocationInput": {
        "actionGroupName": "g", "function": "h", "executionType": "RETURN_CONTROL", "parameters": []}}}}},
    {"routingClassifierTrace": {"invocationInput": {"traceId": "x-4", "agentCollaboratorInvocationInput": {
        "agentCollaboratorName": "other", "input": {"text": "q", "type": "TEXT"}}}}},
    {"routingClassifierTrace": {"observation": {"traceId": "x-4", "agentCollaboratorInvocationOutput": {
        "agentCollaboratorName": "other", "output": {"text": "a", "type": "TEXT"}}}}},
    _traced(observation={"traceId": "x-5", "type": "FINISH", "finalResponse": {"text": "2"}}),
    _traced(modelInvocationInput={"traceId": "x-5", "text": "…", "type": "ORCHESTRATION"}),
    {"chunk": {"bytes": "Mg=="}},
]

MISTRAL: list[Sample] = [
    {"object": "entry", "type": "tool.execution", "created_at": "2026-01-12T10:30:45Z",
     "completed_at": "2026-01-12T10:30:46Z", "id": "tool_exec_1", "name": "code_interpreter",
     "arguments": '{"code": "print(2)"}', "info": {"code": "print(2)", "code_output": "2\n"}},
    {"object": "entry", "type": "tool.execution", "created_at": "2026-01-12T10:30:45Z", "completed_at": None,
     "id": "tool_exec_2", "name": "web_search", "arguments": '{"query":"Zürich"}', "info": {}},
    {"object": "entry", "type": "tool.execution", "id": "tool_exec_3", "name": "web_search_premium",
     "arguments": "{\"query\": \"q\", \"n\": 2}"},
    {"object": "entry", "type": "tool.execution", "id": "tool_exec_4", "name": "document_library",
     "arguments": '{"query": "q"}', "info": {}},
    {"object": "entry", "type": "tool.execution", "id": "tool_exec_5", "name": "image_generation",
     "arguments": '{"prompt": "a cat"}', "info": {}},
    {"object": "entry", "type": "tool.execution", "id": "tool_exec_6", "name": "weather", "arguments": "{", "info": {}},
    {"object": "entry", "type": "function.call", "id": "fc_1", "tool_call_id": "call_1", "name": "f",
     "arguments": '{"a": 1}'},
    {"object": "entry", "type": "function.result", "id": "fr_1", "tool_call_id": "call_1", "result": "3"},
    {"object": "entry", "type": "message.output", "id": "msg_1", "role": "assistant", "content": [
        {"type": "thinking", "thinking": [{"type": "text", "text": "I look."}], "closed": True},
        {"type": "text", "text": "Here "},
        {"type": "tool_reference", "tool": "web_search", "title": "T", "url": "https://e.x"},
        {"type": "tool_file", "tool": "image_generation", "file_id": "file_1", "file_type": "png"}]},
    {"object": "entry", "type": "message.output", "id": "msg_2", "role": "assistant", "content": "2"},
    {"object": "entry", "type": "agent.handoff", "id": "ho_1", "previous_agent_id": "a", "previous_agent_name": "A",
     "next_agent_id": "b", "next_agent_name": "B"},
]


def _tool(kind: str, number: int, name: str, arguments: str) -> Sample:
    return {"id": f"call_{number}", "type": f"TOOL_CALL_TYPE_{kind}", "status": "TOOL_CALL_STATUS_COMPLETED",
            "function": {"name": name, "arguments": arguments}}


XAI: list[Sample] = [
    _tool("WEB_SEARCH_TOOL", 1, "web_search", '{"query":"q","num_results":3}'),
    _tool("X_SEARCH_TOOL", 2, "x_keyword_search", '{"query":"q"}'),
    _tool("CODE_EXECUTION_TOOL", 3, "code_execution", '{"code":"print(2)"}'),
    _tool("COLLECTIONS_SEARCH_TOOL", 4, "file_search", '{"query":"q"}'),
    _tool("ATTACHMENT_SEARCH_TOOL", 5, "search", '{"query":"q"}'),
    _tool("MCP_TOOL", 6, "t", "{}"),
    _tool("IMAGE_GENERATION_TOOL", 7, "draw", '{"prompt":"a cat"}'),
    _tool("CLIENT_SIDE_TOOL", 8, "f", '{"a":1}'),
    _tool("DIVINATION_TOOL", 9, "stars", "{}"),
    {"message": {"role": "ROLE_ASSISTANT", "content": "", "reasoning_content": "I compute.", "tool_calls": [
        _tool("CODE_EXECUTION_TOOL", 10, "code_execution", '{"code":"print(2)"}')]}},
    {"message": {"role": "ROLE_TOOL", "content": "2\n", "tool_calls": [
        _tool("CODE_EXECUTION_TOOL", 10, "code_execution", '{"code":"print(2)"}')]}},
    {"role": "ROLE_ASSISTANT", "content": "2", "encrypted_content": "AAA"},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_11", "name": "x_semantic_search",
     "input": '{"query":"q"}', "status": "completed"},
    {"type": "x_search_call", "id": "xs_1", "status": "completed", "action": {"query": "q"}},
    {"type": "code_execution_call", "id": "ce_1", "status": "completed", "arguments": '{"code":"print(2)"}'},
    {"type": "view_image_call", "id": "vi_1", "status": "completed", "arguments": '{"image_url":"https://e.x"}'},
    {"type": "view_x_video_call", "id": "vv_1", "status": "completed", "arguments": '{"video_url":"https://e.x"}'},
    *OPENAI[2:9],
]

SAMPLES: dict[str, list[Any]] = {
    "openai": OPENAI,
    "anthropic": [*ANTHROPIC, *ANTHROPIC_SENT],
    "gemini": GEMINI["candidates"][0]["content"]["parts"],
    "gemini-interactions": INTERACTIONS,
    "azure": AZURE,
    "bedrock": BEDROCK,
    "bedrock-agents": BEDROCK_AGENTS,
    "mistral": MISTRAL,
    "xai": XAI,
}

# Whole responses, by vendor: where the lists of items are in a document.
DOCUMENTS: list[tuple[str, Any]] = [
    ("openai", {"id": "resp_1", "object": "response", "output": OPENAI[2:6], "usage": None}),
    ("openai", {"id": "resp_1", "object": "response", "output": []}),
    ("openai", {"input": OPENAI[:1], "model": "m", "data": [OPENAI[2]]}),
    ("anthropic", {"id": "msg_1", "type": "message", "role": "assistant", "content": ANTHROPIC, "usage": {}}),
    ("anthropic", [{"role": "user", "content": "Search."}, {"role": "assistant", "content": ANTHROPIC[2:4]},
                   {"role": "user", "content": ANTHROPIC_SENT[3:4]}]),
    ("gemini", GEMINI),
    ("gemini", GEMINI_GROUNDED),
    ("gemini", [GEMINI_GROUNDED, GEMINI, {"usageMetadata": {}}]),
    ("gemini", {"candidates": [{"content": {"parts": []}}, {"finishReason": "SAFETY"}]}),
    ("gemini", {"role": "model", "parts": [{"executable_code": {"language": "PYTHON", "code": "1"}},
                                           {"code_execution_result": {"outcome": "OUTCOME_OK", "output": "1"}},
                                           {"tool_call": {"tool_type": "GOOGLE_MAPS", "id": "m", "args": {}}},
                                           {"inline_data": {"mime_type": "image/png", "data": _PNG}},
                                           {"file_data": {"mime_type": "image/png", "file_uri": "gs://b/a"}}]}),
    ("gemini-interactions", {"id": "i1", "status": "completed", "steps": INTERACTIONS}),
    ("azure", {"id": "step_1", "object": "thread.run.step", "type": "tool_calls", "status": "completed",
               "step_details": {"type": "tool_calls", "tool_calls": AZURE[:3]}}),
    ("azure", {"object": "list", "data": [
        {"id": "step_1", "type": "tool_calls", "step_details": {"type": "tool_calls", "tool_calls": AZURE[:2]}},
        {"id": "step_2", "type": "message_creation", "step_details": {"type": "message_creation"}},
        {"id": "step_3", "type": "tool_calls", "step_details": {"type": "tool_calls", "tool_calls": AZURE[2:4]}}]}),
    ("bedrock", {"output": {"message": {"role": "assistant", "content": BEDROCK}}, "stopReason": "end_turn"}),
    ("bedrock-agents", {"completion": BEDROCK_AGENTS, "sessionId": "s"}),
    ("mistral", {"conversation_id": "c", "outputs": MISTRAL, "usage": {}}),
    ("xai", {"id": "x", "outputs": XAI[9:11]}),
]

-- Returns why waiting calls have no slot yet. Changes nothing. slots_state.lua precedes this file in the same script.
--
-- `operations_json`: a list of the entries of these calls, or of their fields tenant and queue.

local reasons = {}
for position, call in ipairs(cjson.decode(operations_json)) do reasons[position] = waiting_reason(call) end
return reasons

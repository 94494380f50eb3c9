-- Read the counters of a task and of one consumer group, consistently. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Stats` of redrb/stream/task/calls.py
-- Returns its reply
--@include task clock ledger pending counters

local ask, figures = cmsgpack.unpack(ARGV[1]), {}
local group = ask.group
local function report(name, value)
  figures[name] = value
end

if not exists() then
  return cmsgpack.pack(nil)
end
local stored = report_task(report)
if redis.call('SISMEMBER', key('groups'), group) == 1 then
  report_group(report, group, count_leased(group), put_totals(), reported_ms())
else
  report_found(report, stored)
end
return cmsgpack.pack(figures)

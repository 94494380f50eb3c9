-- Read the counters of a task and of one consumer group, consistently. Writes nothing.
-- KEYS[1] stream
-- ARGV    group
-- Returns a flat list name, number, ...: include/figures.lua; {} if there is no task
--@include task clock ledger pending figures

local found, group = {}, ARGV[1]
local function report(name, value)
  found[#found + 1], found[#found + 2] = name, value
end

if not exists() then
  return {}
end
local stored = report_task(report)
if redis.call('SISMEMBER', key('groups'), group) == 1 then
  report_group(report, group, count_leased(group), put_totals(), reported_ms())
else
  report_found(report, stored)
end
return found

-- Change the priority of entries, and with it their place in the order.
-- KEYS[1] stream
-- ARGV    the call `Rescore` of redrb/stream/task/calls.py
-- Returns its reply
--@include task facts pools groups permissions

check_permissions(KEYS[1])
begin_writing()
local ask, changed = cmsgpack.unpack(ARGV[1]), 0
if not exists() or rules().order ~= ask.order then
  return cmsgpack.pack(nil)
end
for _, change in ipairs(ask.changes) do
  local seq, priority, score = unpack(change)
  local member = member_of(seq)
  local facts = facts_of(member)
  if facts then
    local homes = {}
    for _, group in ipairs(groups()) do
      homes[group] = waits_in(group, seq)
    end
    for group, pool in pairs(homes) do
      withdraw(group, pool, {member})
    end
    facts.priority, facts.score = priority, score
    store_facts(member, facts)
    for group, pool in pairs(homes) do
      enter(group, pool, {member}, {facts})
    end
    changed = changed + 1
  end
end
if has_entered() then -- takes may look for them that have passed their new places
  --@include waking
  wake_entered()
end
return cmsgpack.pack(changed)

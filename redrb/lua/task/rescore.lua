-- Change the priority of entries, and with it their place in the order.
-- KEYS[1] stream
-- ARGV    order, then for each entry: seq, priority, score
--         order: name of the order that the scores are for
-- Returns {'ok', entries}: how many of the entries are stored
--         | {'gone'}: there is no such task | {'differs'}: it has another order
--@include task facts pools groups permissions

check_permissions(KEYS[1])
begin_writing()
local changed = 0
if not exists() then
  return {'gone'}
elseif rules().order ~= ARGV[1] then
  return {'differs'}
end
for i = 2, #ARGV, 3 do
  local member, seq = member_of(ARGV[i]), ARGV[i]
  local facts = facts_of(member)
  if facts then
    local homes = {}
    for _, group in ipairs(groups()) do
      homes[group] = waits_in(group, seq)
    end
    for group, pool in pairs(homes) do
      withdraw(group, pool, {member})
    end
    facts.priority, facts.score = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    store_facts(member, facts)
    for group, pool in pairs(homes) do
      enter(group, pool, {member}, {facts})
    end
    changed = changed + 1
  end
end
return {'ok', changed}

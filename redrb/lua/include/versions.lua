-- Counts the groups of a new weight version as trained, for admission.
--@include task facts pending

-- The task's version is about to advance. Trainers acknowledge the groups of a version before they publish it
-- or after that, so groups that are leased may count; but no more than the version was to have.
local function advance_mark(version)
  local rule, known = rules(), numbers(key('admission'), 'trained', 'mark')
  local trained, mark, leased = known[1], known[2], 0
  for _, group in ipairs(groups()) do
    leased = math.max(leased, count_leased(group))
  end
  if rule.version then
    mark = math.min(mark + (version - rule.version) * rule.groups_per_version, trained + leased)
  else
    mark = trained + math.min(leased, rule.groups_per_version)
  end
  mark = math.max(mark, trained - rule.max_staleness * rule.groups_per_version)
  redis.call('HSET', key('admission'), 'mark', string.format('%.17g', mark))
end

-- Health of a Drafter for Argo CD, in kstatus's order of conditions.
local health = {status = "Progressing", message = "waiting for the operator"}
local status = obj.status
if status == nil or status.observedGeneration ~= obj.metadata.generation then
  return health
end
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end
local function is(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end
health.message = status.message
if is("Suspended") then
  health.status = "Suspended"
elseif is("Reconciling") then
  health.status = "Progressing"
elseif is("Stalled") then
  health.status = "Degraded"
elseif is("Ready") then
  health.status = "Healthy"
end
return health

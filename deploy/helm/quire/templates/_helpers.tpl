{{- define "quire.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "quire.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "quire.secret" -}}
{{ .Values.apiKey.existingSecret | default (include "quire.name" .) }}
{{- end -}}

{{- define "quire.claim" -}}
{{ .Values.cache.existingClaim | default (printf "%s-cache" (include "quire.name" .)) }}
{{- end -}}

{{- define "quire.env" -}}
- name: QUIRE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.secret" . }}
      key: {{ .Values.apiKey.key }}
{{- if .Values.hfTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.hfTokenSecret }}
      key: token
{{- end }}
- name: QUIRE_CACHE
  value: /cache/quire
- name: HF_HOME
  value: /cache/huggingface
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quire.volumes" -}}
- name: cache
  {{- if .Values.cache.enabled }}
  persistentVolumeClaim:
    claimName: {{ include "quire.claim" . }}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shmSize }}
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "quire.mounts" -}}
- name: cache
  mountPath: /cache
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
